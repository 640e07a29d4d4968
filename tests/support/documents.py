"""Read the code blocks of Markdown documents."""

import re


def language_blocks(text: str) -> list[tuple[str, str]]:
    """Return language and text of each code block that names a language."""
    return re.findall(r"^```(\S[^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def code_blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return [code for block_language, code in language_blocks(text) if block_language == language]
