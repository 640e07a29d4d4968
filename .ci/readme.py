"""Print the commands in README.md: with `setup` the blocks before the heading "Commands", else those after it."""

import re
import sys
from pathlib import Path

text = Path(__file__).parent.parent.joinpath("README.md").read_text("utf-8")
before, _, after = text.partition("\n## Commands\n")
blocks = re.findall(
    r"^```bash\n(.*?)^```$", {"setup": before, "commands": after}[sys.argv[1]], re.DOTALL | re.MULTILINE
)
if not blocks:
    sys.exit(f"README.md has no ```bash blocks for {sys.argv[1]!r}")
sys.stdout.write("\n".join(blocks))
