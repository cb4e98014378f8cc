"""Public names: which model a request means, whether this caller may have it, and which of its replicas.

A replica dedicated to a tenant exists for that tenant alone. To everybody else a model is what remains of it, and one
of which nothing remains is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from gateway.errors import ModelNotFound, VariantNotFound
from gateway.types import Model, Principal, Replica

DEFAULT_TAG = ":latest"


def find(asked: str, names: Mapping[str, Model]) -> Model | None:
    """The model behind a name or alias. A name without a tag also means `:latest`, and never another tag."""
    # Both are looked up whether or not the first is there: that it is may be nothing for the caller to know.
    exact, tagged = names.get(asked), names.get(asked + DEFAULT_TAG)
    return tagged if exact is None and ":" not in asked else exact


def resolve(asked: str, principal: Principal, names: Mapping[str, Model]) -> Model:
    """The model this caller means; for `name@variant` the model with the replicas of that variant only.

    Raises: ModelNotFound, equally for names that do not exist and names the caller may not use; VariantNotFound.
    """
    model = principal.seen.get(asked)
    if model is not None:
        return model
    model, variant = lookup(asked, principal, names), ""
    if model is None and "@" in asked:
        name, _, variant = asked.rpartition("@")
        model = lookup(name, principal, names)
    if model is None:
        raise ModelNotFound(asked)
    return _variant(model, variant.lower()) if variant else model


def lookup(name: str, principal: Principal, names: Mapping[str, Model]) -> Model | None:
    """The model of that name or alias as this caller has it; None for a name that is unknown, and for one it may not
    use. The same object each time, so that it can be compared by identity."""
    model = principal.seen.get(name)
    if model is None:
        model = _own_view(name, find(name, names), principal)
        if model is not None and name in names:  # configured names only, so that callers cannot make it grow
            principal.seen[name] = model
    return model


def _own_view(name: str, model: Model | None, principal: Principal) -> Model | None:
    """An unknown name takes the steps of a hidden one: the time to a refusal tells them apart no more than its text."""
    aliases, replicas = (model.aliases, model.replicas) if model is not None else ((), ())
    allowed = _may_use(principal, model.name if model is not None else name, aliases)
    own = _own(replicas, principal.tenant.name)
    if model is None or not allowed or (replicas and not own):
        return None
    if len(own) == len(replicas):
        return model
    view = principal.seen.get(model.name)
    if view is None:
        view = principal.seen[model.name] = _narrowed(model, own)
    return view


def _may_use(principal: Principal, name: str, aliases: tuple[str, ...]) -> bool:
    """Whether the tenant's and the key's allow lists both name this model: by name, by glob, or by an alias."""
    key_models = principal.key_models
    return _listed(name, aliases, principal.models) and (key_models is None or _listed(name, aliases, key_models))


def _listed(name: str, aliases: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    # Globs match names only: `gpt-*` must not let in whatever else got an alias that looks like it.
    return any(fnmatchcase(name, pattern) or pattern in aliases for pattern in patterns)


def _own(replicas: tuple[Replica, ...], tenant: str) -> tuple[Replica, ...]:
    """The replicas dedicated to the tenant; where it has none, those dedicated to nobody."""
    dedicated = tuple([replica for replica in replicas if replica.tenant == tenant])
    shared = tuple([replica for replica in replicas if replica.tenant is None])
    return dedicated or shared


def _narrowed(model: Model, replicas: tuple[Replica, ...]) -> Model:
    """The model with some of its replicas. What was gathered from all of them is gathered anew: the window and the
    capabilities of the others are theirs."""
    length, capabilities = model.context_length, model.capabilities
    if length == _longest(model.replicas):
        length = _longest(replicas)
    if capabilities == _capabilities(model.replicas):
        capabilities = _capabilities(replicas)
    return replace(model, replicas=replicas, context_length=length, capabilities=capabilities)


def _longest(replicas: tuple[Replica, ...]) -> int | None:
    return max((replica.context_length or 0 for replica in replicas), default=0) or None


def _capabilities(replicas: tuple[Replica, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for replica in replicas for name in replica.capabilities))


def variants(model: Model) -> list[str]:
    """What may stand behind the `@`: formats, quantisations and backends of the replicas, each once."""
    words = (word for replica in model.replicas for word in _words(replica))
    return list(dict.fromkeys(words))


def variant_note(model: Model, principal: Principal, names: Mapping[str, Model]) -> str:
    """For the message of a request whose variant is away: which ones the caller has. Empty for a whole model."""
    whole = lookup(model.name, principal, names)
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
    for name, whole in models.items():
        # Not through `lookup`, which would keep every model there is for each of thousands of callers.
        model = principal.seen.get(name) or _own_view(name, whole, principal)
        if model is not None:
            yield name, model
            for alias in model.aliases:
                yield alias, model
