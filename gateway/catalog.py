"""Public names: which model a request means, and whether this caller may have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from gateway.errors import ModelNotFound
from gateway.types import Model, Principal

DEFAULT_TAG = ":latest"


def find(asked: str, names: Mapping[str, Model]) -> Model | None:
    """The model behind a name or alias. A name without a tag also means `:latest`, and never another tag."""
    model = names.get(asked)
    if model is None and ":" not in asked:
        model = names.get(asked + DEFAULT_TAG)
    return model


def may_use(principal: Principal, model: Model) -> bool:
    """Whether the tenant's and the key's allow lists both name this model: by name, by glob, or by an alias."""
    return _listed(model, principal.models) and (principal.key_models is None or _listed(model, principal.key_models))


def _listed(model: Model, patterns: tuple[str, ...]) -> bool:
    # Globs match names only: `gpt-*` must not let in whatever else got an alias that looks like it.
    return any(fnmatchcase(model.name, pattern) or pattern in model.aliases for pattern in patterns)


def resolve(asked: str, principal: Principal, names: Mapping[str, Model]) -> Model:
    """The model this caller means.

    Raises: ModelNotFound, equally for names that do not exist and names the caller may not use.
    """
    model = principal.seen.get(asked)
    if model is not None:
        return model
    model = find(asked, names)
    if model is None or not may_use(principal, model):
        raise ModelNotFound(asked)
    if asked in names:  # remembers configured names only, so that callers cannot make it grow
        principal.seen[asked] = model
    return model


def visible(principal: Principal, models: Mapping[str, Model]) -> Iterator[tuple[str, Model]]:
    """Every name this caller can put into a request, models first by their own name, then their aliases; each once."""
    for model in models.values():
        if may_use(principal, model):
            yield model.name, model
            for alias in model.aliases:
                yield alias, model
