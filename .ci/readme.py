"""Print README's commands: with `setup` the blocks before the heading "Commands", else those after it and of docs/."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
text = ROOT.joinpath("README.md").read_text("utf-8")
before, _, after = text.partition("\n## Commands\n")
after += ROOT.joinpath("docs", "commands.md").read_text("utf-8")
blocks = re.findall(
    r"^```bash\n(.*?)^```$", {"setup": before, "commands": after}[sys.argv[1]], re.DOTALL | re.MULTILINE
)
if not blocks:
    sys.exit(f"README.md has no ```bash blocks for {sys.argv[1]!r}")
sys.stdout.write("\n".join(blocks))
