"""Generate graphquant/formats/tensorflow/opdefs.txt from the operations of the installed TensorFlow.

Run it as `python tests/formats/tensorflow/generate_opdefs.py` from the top of the repository.
"""

from itertools import groupby
from pathlib import Path

from graphquant.formats.tensorflow import ops, proto

TARGET = Path(__file__).parents[3] / "graphquant" / "formats" / "tensorflow" / "opdefs.txt"
HEAD = """\
# Inputs and outputs of TensorFlow's registered operations; ops.py reads this table, generate_opdefs.py writes it.
#
#   NAME [!] INPUT... > OUTPUT... [| DEFAULT...]     `!` marks a stateful operation
#   name=dtype | name:type_attr                      an argument of one port
#   name*number_attr=dtype | name*number_attr:type_attr | name@type_list_attr    one of several ports
#   arguments in a row that differ in nothing but the name share the rest, as in a,b:T
#   a trailing & marks a reference type; DEFAULT is attribute=value for the attributes that arguments refer to
"""


def registered_op_defs():
    """Return the OpDef messages of every operation in the installed TensorFlow, sorted by name."""
    from tensorflow.python.client import pywrap_tf_session

    data = pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList())
    return sorted(proto.parse_binary(data, proto.message_class("OpList")()).op, key=lambda op_def: op_def.name)


def kind_text(arg: ops.ArgSpec) -> str:
    """Return an argument's text without its name."""
    if arg.type_list_attr:
        text = f"@{arg.type_list_attr}"
    else:
        text = (f"*{arg.number_attr}" if arg.number_attr else "") + (
            f"={arg.dtype}" if arg.dtype else f":{arg.type_attr}"
        )
    return text + ("&" if arg.is_ref else "")


def args_text(args: tuple[ops.ArgSpec, ...]) -> list[str]:
    """Return the arguments in order; those that differ only in name are joined."""
    runs = groupby(args, key=kind_text)
    return [",".join(arg.name for arg in run) + kind for kind, run in runs]


def default_text(value: ops.AttrDefault) -> str:
    """The default of an attribute."""
    return f"[{','.join(value)}]" if isinstance(value, tuple) else str(value)


def table_line(spec: ops.OpSpec) -> str:
    """Return the table line of an operation."""
    words = [spec.name]
    words += ["!"] if spec.is_stateful else []
    words += [*args_text(spec.inputs), ">", *args_text(spec.outputs)]
    if spec.defaults:
        words += ["|", *(f"{name}={default_text(value)}" for name, value in sorted(spec.defaults.items()))]
    return " ".join(words)


def write_table() -> None:
    """Write the table."""
    lines = [table_line(ops._parse_op_def(op_def)) for op_def in registered_op_defs()]
    TARGET.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_table()
