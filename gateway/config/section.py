"""What every section of the configuration shares."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """What every section shares: immutable, no unknown keys, and no values in error texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
