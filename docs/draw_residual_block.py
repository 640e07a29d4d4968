"""Draws images/residual_block.svg: a block of a sample model before and after `graphquant insert`. Needs graphviz.

Both halves are cut out of what `graphquant inspect --format dot` prints.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "sample_models"
SHOWN = re.compile(r'"(max_pool(/quant.*)?|residual(_[12])?/(?!conv_bias)[^"]*)"')
NODE = re.compile(r'^  ("[^"]*") \[(.*)\];$')
EDGE = re.compile(r'^  ("[^"]*") -> ("[^"]*")( \[.*\])?;$')
STYLE = 'fontname="Helvetica,Arial,sans-serif", fontsize=10'
HEAD = f"""digraph residual_block {{ nodesep=0.2; ranksep=0.25;
  graph [{STYLE}]; edge [arrowsize=0.7];
  node [{STYLE}, shape=box, style="rounded,filled", height=0.3, margin="0.1,0.04"];
"""


def graphquant(*arguments: str) -> str:
    """What the program prints."""
    command = [sys.executable, "-m", "graphquant", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def half(model: Path, side: str, title: str) -> str:
    """The block of `model` as a cluster; its names start with `side`, as DOT has a single name space."""
    lines = [f'  subgraph cluster_{side} {{ label="{title}"; fontsize=16; color=white;']
    for line in graphquant("inspect", str(model), "--format", "dot").splitlines():
        if (node := NODE.match(line)) and SHOWN.fullmatch(node[1]):
            label = re.sub(r"(residual_\d)/conv_weights_fused_bn", r"weights of \1", node[2])
            lines.append(f'    "{side}{node[1][1:]} [{label}];')
        elif (edge := EDGE.match(line)) and SHOWN.fullmatch(edge[1]) and SHOWN.fullmatch(edge[2]):
            lines.append(f'    "{side}{edge[1][1:]} -> "{side}{edge[2][1:]};')
    return "\n".join([*lines, "  }\n"])


def main() -> None:
    """Quantizes the model into a scratch folder and draws both."""
    before = SAMPLES / "digits_cnn.onnx"
    with tempfile.TemporaryDirectory() as scratch:
        after = Path(scratch, "after.onnx")
        graphquant("insert", str(before), "--data", str(SAMPLES / "digits_cnn_calib.npz"), "-o", str(after))
        text = HEAD + half(before, "before", "before") + half(after, "after", "after graphquant insert") + "}\n"
    target = HERE / "images" / "residual_block.svg"
    subprocess.run(["dot", "-Tsvg", "-o", str(target)], input=text, check=True, text=True)


if __name__ == "__main__":
    main()
