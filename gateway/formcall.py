"""A form becomes a Call: one that carries a file and is never rewritten but for the model's name."""

from __future__ import annotations

from backends.base import Edits, Operation
from gateway.call import JSON, Call
from gateway.errors import BadRequest
from gateway.media import check_form
from gateway.multipart import Part, boundary_of, parts_of

LONGEST_FIELD = 64 * 1024  # bytes of a field that is no file and is read at all
_LONGEST_MODEL = 512  # bytes
_TOKENS_PER_FILE = 1000  # the size in bytes says little: a minute of sound has 100 kB or 10 MB
_CHARACTERS_PER_TOKEN = 4


class FormCall(Call):
    """`body` holds the fields that are text, the last of each name; files stay in `raw`."""

    __slots__ = ("_span",)

    def __init__(self, operation: Operation, raw: bytes, fields: JSON, span: tuple[int, int], tokens: int) -> None:
        super().__init__(operation, raw, fields)
        self._span = span
        self._prompt_tokens = tokens
        self.stream = str(fields.get("stream", "")).lower() in ("true", "1", "on", "yes")
        self.max_tokens, self.answers = None, 1

    def for_engine(self, model: str, edits: Edits, salt: str = "") -> bytes:
        """The form with the engine's name for the model. No engine has a salt or other options to change in forms."""
        if model == self.model:
            return self.raw
        start, end = self._span
        return b"%b%b%b" % (self.raw[:start], model.encode(), self.raw[end:])

    def pieces_for_engine(self, model: str, edits: Edits, salt: str = "") -> list[bytes | memoryview]:
        if model == self.model:
            return [self.raw]
        view, (start, end) = memoryview(self.raw), self._span
        return [view[:start], model.encode(), view[end:]]


def parse_form(operation: Operation, raw: bytes, content_type: bytes | None) -> FormCall:
    """Raises: InvalidBody, BadRequest; each says what to send instead."""
    boundary = boundary_of(content_type)
    parts = parts_of(raw, boundary)
    model = _model(parts)
    name = raw[model.start : model.end]
    if not 0 < len(name) <= _LONGEST_MODEL:
        raise _bad_model("'model' has to be a name.")
    if not any(part.is_file and part.name == "file" for part in parts):
        raise BadRequest("You must provide a file.", param="file", code="missing_required_parameter")
    check_form(part.name for part in parts if not part.is_file)
    fields: JSON = {}
    tokens = 0
    for part in parts:
        if part.is_file:
            tokens += _TOKENS_PER_FILE
        elif part.end - part.start <= LONGEST_FIELD:
            fields[part.name] = raw[part.start : part.end].decode(errors="replace")
            tokens += (part.end - part.start) // _CHARACTERS_PER_TOKEN if part.name == "prompt" else 0
    try:
        fields["model"] = name.decode()
    except UnicodeDecodeError:
        raise _bad_model("'model' has to be UTF-8.") from None
    fields.pop("stream_options", None)  # JSON has it, forms do not
    fields.pop("n", None)
    return FormCall(operation, raw, fields, (model.start, model.end), tokens)


def _model(parts: list[Part]) -> Part:
    found = [part for part in parts if part.name == "model"]
    if not found:
        raise BadRequest("You must provide a model.", param="model", code="missing_required_parameter")
    if len(found) > 1:
        raise _bad_model("The form has more than one 'model'; which of them counts would be a guess.")
    if found[0].is_file or found[0].encoded:
        raise _bad_model("'model' has to be plain text.")
    return found[0]


def _bad_model(message: str) -> BadRequest:
    return BadRequest(message, param="model", code="invalid_value")
