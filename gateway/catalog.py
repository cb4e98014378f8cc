"""Public names: which model a request means, and whether this caller may have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from gateway.errors import ModelNotFound, VariantNotFound
from gateway.types import Model, Principal, Replica

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
    """The model this caller means; for `name@variant` the model with the replicas of that variant only.

    Raises: ModelNotFound, equally for names that do not exist and names the caller may not use; VariantNotFound.
    """
    model = principal.seen.get(asked)
    if model is not None:
        return model
    model = find(asked, names)
    variant = ""
    if model is None and "@" in asked:
        name, _, variant = asked.rpartition("@")
        model = find(name, names)
    if model is None or not may_use(principal, model):
        raise ModelNotFound(asked)
    if variant:
        return _variant(model, variant.lower())
    if asked in names:  # remembers configured names only, so that callers cannot make it grow
        principal.seen[asked] = model
    return model


def variants(model: Model) -> list[str]:
    """What may stand behind the `@`: formats, quantisations and backends of the replicas, each once."""
    words = (word for replica in model.replicas for word in _words(replica))
    return list(dict.fromkeys(words))


def variant_note(model: Model, names: Mapping[str, Model]) -> str:
    """For the message of a request whose variant is away: which ones there are. Empty for a whole model."""
    whole = names.get(model.name)
    if whole is None or whole is model:
        return ""
    return f" The model '{model.name}' has the variants: {', '.join(variants(whole)) or 'none'}."


def _variant(model: Model, variant: str) -> Model:
    chosen = tuple(replica for replica in model.replicas if variant in _words(replica))
    if not chosen:
        raise VariantNotFound(model.name, variant, variants(model))
    # Whoever asks for a variant wants that one: another model would not be it.
    return replace(model, replicas=chosen, fallbacks=(), format_preference=())


def _words(replica: Replica) -> Iterator[str]:
    for word in (replica.format, replica.quantization, replica.backend.kind):
        if word and " " not in word:
            yield word.lower()


def visible(principal: Principal, models: Mapping[str, Model]) -> Iterator[tuple[str, Model]]:
    """Every name this caller can put into a request, models first by their own name, then their aliases; each once."""
    for model in models.values():
        if may_use(principal, model):
            yield model.name, model
            for alias in model.aliases:
                yield alias, model
