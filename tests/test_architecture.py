"""Imports point one way: read from the syntax tree, so a lazy or type-only import counts like any other.

    backends.failures, promtext <- base <- formats <- one module per engine      backends never imports gateway
    units keys <- types errors config <- pure logic <- state <- network I/O <- pipeline <- api admin <- app <- __main__
"""

import ast
import importlib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pydantic
import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module imports from lower ranks, or from its own without a cycle. A folder has one rank; a module in it that needs
# another goes by both names, as in `media.fetching`.
RANKS: dict[str, int] = {
    name: rank
    for rank, names in enumerate((
        "units keys build children",
        "types errors config",
        "call formcall bigjson jsonscan jsonplaces multipart answers auth catalog limits media"
        " outcome prefixes routing sse usage metrics"
        " logs dialect_tap fit addresses edge.crowd edge.cors windows fairness retries records"
        " people certificates claims workers.merged"
        " tools provenance tracing masking",  # no network
        "workers.places snapshot replica_state fleet waiting",  # state, one writer each
        "reply edge tls"
        " upstream passthrough engine_client probe discovery embedded limits_redis tokens store spool"
        " notify directory media.fetching"
        " tracing.spans tracing.sender tracing.tracer content",  # all network I/O
        "workers.control workers.peers listening state attempt hedge forward pipeline stores keybook",
        "api admin docs_page scan",
        "configured worker workers",
        "app commands",
        "__main__",
    ))
    for name in names.split()
}
STATE_RANK = RANKS["snapshot"]

# Helpers that the adapters share. Every other module in backends/ is one engine and knows nothing of the others.
BACKEND_RANKS = {"failures": 0, "promtext": 0, "cards": 0, "base": 1, "formats": 1, "shaping": 1}
ENGINE_RANK = 2

# The one way to an engine over the network, and who may use an HTTP client off the hot path, with the reason.
ENGINE_CONNECTIONS = {"gateway.upstream"}
CONNECTING_CALLS = {"create_connection", "create_unix_connection", "open_connection", "open_unix_connection"}
HTTPX_USERS = {
    "gateway.engine_client": "GET requests of probes and discovery",
    "gateway.probe": "its errors",
    "gateway.discovery": "its errors",
    "gateway.commands.remote": "the command line, talking to a running gateway",
    "gateway.tokens.places": "key sets of token issuers",
    "gateway.tokens": "the client that it makes for them",
    "gateway.media.fetching": "what requests link to",
}
OTHER_CLIENTS = {"aiohttp", "requests", "urllib3", "http.client", "urllib.request", "httpcore"}
EMBEDDED_ENGINE_USERS = {"gateway.embedded"}

NETWORK = {"socket", "ssl", "selectors", "socketserver", "redis", "httpx", "uvicorn", "fastapi", "starlette"}
CLOCK_AND_CHANCE = {"time", "random"}
DECIDERS = {
    f"gateway.{name}"
    for name in (
        "call formcall jsonscan multipart answers auth catalog limits media prefixes routing sse dialect_tap fit"
        " fairness retries tools tools.offers tools.calls tools.tap jsonplaces media.fields media.filetypes media.links"
    ).split()
}


def modules(package: str) -> dict[str, Path]:
    """Dotted name -> file; a package's __init__ goes by the package's name."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


GATEWAY = modules("gateway")
BACKENDS = modules("backends")
KNOWN = GATEWAY | BACKENDS


def tree(name: str) -> ast.Module:
    return ast.parse(KNOWN[name].read_text("utf-8"), filename=str(KNOWN[name]))


def imports(name: str) -> set[str]:
    """Every module that `name` imports, wherever in the file the import stands."""
    package = name if KNOWN[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            submodules = {f"{base}.{alias.name}" for alias in node.names} & KNOWN.keys()
            found |= submodules
            if len(submodules) < len(node.names):
                found.add(base)
    return found - {name}


def uses(name: str, packages: set[str] | Mapping[str, str]) -> set[str]:
    return {target for target in imports(name) for package in packages if f"{target}.".startswith(f"{package}.")}


def unit(name: str) -> str:
    """What has a rank: a module or folder of the package, or a module in a folder that has one of its own."""
    parts = name.split(".")
    own = ".".join(parts[1:3])
    return own if own in RANKS else parts[1] if len(parts) > 1 else ""


def gateway_rank(name: str) -> int:
    return RANKS[unit(name)] if unit(name) else -1


def backend_rank(name: str) -> int:
    return BACKEND_RANKS.get(unit(name), ENGINE_RANK)


@pytest.mark.parametrize("name", [name for name in GATEWAY if unit(name)])
def test_gateway_module_has_a_rank(name: str) -> None:
    assert unit(name) in RANKS, f"{name} is new: give it a rank in tests/test_architecture.py (what may import it?)"


@pytest.mark.parametrize("name", [name for name in GATEWAY if unit(name) in RANKS or not unit(name)])
def test_gateway_imports_point_down(name: str) -> None:
    wrong = sorted(
        target for target in imports(name) & GATEWAY.keys()
        if unit(target) in RANKS and unit(target) != unit(name) and gateway_rank(target) > gateway_rank(name))
    assert not wrong, f"{name} (rank {gateway_rank(name)}) imports from above: {', '.join(wrong)}"


def test_no_import_cycles() -> None:
    graph = {name: imports(name) & KNOWN.keys() for name in KNOWN}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("name", [name for name in BACKENDS if unit(name)])
def test_backend_imports(name: str) -> None:
    highest = min(backend_rank(name), ENGINE_RANK - 1)
    assert not uses(name, {"gateway"}), f"{name} imports the gateway; backends know nothing of it"
    wrong = sorted(
        target for target in imports(name) & BACKENDS.keys()
        if unit(target) and unit(target) != unit(name) and backend_rank(target) > highest)
    assert not wrong, f"{name} imports {', '.join(wrong)}: share code through backends/base.py"
    if unit(name) != "llamacpp":
        io = uses(name, NETWORK | OTHER_CLIENTS | {"asyncio", "threading"})
        assert not io, f"{name} imports {', '.join(sorted(io))}: an adapter is bytes in, values out"


@pytest.mark.parametrize("name", GATEWAY)
def test_embedded_engine_is_entered_in_one_place(name: str) -> None:
    if name not in EMBEDDED_ENGINE_USERS:
        found = uses(name, {"backends.llamacpp", "llama_cpp"})
        assert not found, f"{name} imports {', '.join(sorted(found))}: only {', '.join(EMBEDDED_ENGINE_USERS)} may"


@pytest.mark.parametrize("name", [name for name in GATEWAY if unit(name) in RANKS and gateway_rank(name) < STATE_RANK])
def test_pure_modules_do_no_network_io(name: str) -> None:
    found = uses(name, NETWORK | OTHER_CLIENTS)
    assert not found, f"{name} imports {', '.join(sorted(found))}: rank {gateway_rank(name)} does no network I/O"
    if name in DECIDERS:
        found = uses(name, CLOCK_AND_CHANCE)
        assert not found, f"{name} imports {', '.join(sorted(found))}: time and chance are arguments here"


@pytest.mark.parametrize("name", GATEWAY)
def test_clients(name: str) -> None:
    if name not in ENGINE_CONNECTIONS:
        calls = sorted({word for word, _ in attribute_calls(name) if word in CONNECTING_CALLS})
        assert not calls, f"{name} calls {', '.join(calls)}: only {', '.join(ENGINE_CONNECTIONS)} connects to engines"
    if name not in HTTPX_USERS:
        assert not uses(name, {"httpx"}), f"{name} imports httpx: for modules off the hot path, listed in HTTPX_USERS"
    found = uses(name, OTHER_CLIENTS)
    assert not found, f"{name} imports {', '.join(sorted(found))}: the HTTP client off the hot path is httpx"


def attribute_calls(name: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call):
            word = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield word, node.lineno


def test_every_config_field_is_described() -> None:
    importlib.import_module("gateway.config")
    models = [model for model in below(pydantic.BaseModel) if model.__module__.startswith("gateway.config")]
    silent = [
        f"{model.__name__}.{field}" for model in models for field, info in model.model_fields.items()
        if not (info.description or "").strip()]
    assert models
    assert not silent, f"say what it does and what its default means: {', '.join(silent)}"


def below(model: type[pydantic.BaseModel]) -> Iterator[type[pydantic.BaseModel]]:
    for child in model.__subclasses__():
        yield child
        yield from below(child)
