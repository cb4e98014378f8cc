"""What the documents of the repository are made of: `python -m gateway.config --schema`, or `--docs`."""

import json
import sys

from gateway.config import docs, schema


def main(arguments: list[str]) -> str:
    """The text to print. Raises: SystemExit."""
    if arguments == ["--schema"]:
        return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
    if arguments == ["--docs"]:
        return docs.page(docs.INTRODUCTION.read_text("utf-8"))
    sys.exit("usage: python -m gateway.config --schema > config/schema.json, or --docs > docs/configuration.md")


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]))
