"""compose.yaml and the images: valid by their schemas, hardened, and in step with command line, protos and packages."""

import re
from pathlib import Path
from typing import TypeAlias

import pytest
import yaml

from engine.kernels.cpu.build import COMPILERS
from kvrelay.serving.settings import RoleSettings
from tests.meta.commands import environment_of, unknown_part
from tests.meta.repository import PACKAGES, ROOT, own_files, relative, run_tool

pytestmark = pytest.mark.compose

Yaml: TypeAlias = "str | int | bool | list[Yaml] | dict[str, Yaml] | None"

_COMPOSE_FILE = ROOT / "compose.yaml"
_DOCKERFILES = tuple(path for path in own_files() if path.name.startswith("Dockerfile"))
_DRAIN_S = float(RoleSettings.model_fields["drain_timeout_s"].default)


def _mapping(value: Yaml) -> dict[str, Yaml]:
    assert isinstance(value, dict), value
    return value


def _texts(value: Yaml) -> list[str]:
    assert isinstance(value, list), value
    return [str(item) for item in value]


_COMPOSE = _mapping(yaml.safe_load(_COMPOSE_FILE.read_text(encoding="utf-8")))
_SERVICES = {name: _mapping(service) for name, service in _mapping(_COMPOSE["services"]).items()}
each_service = pytest.mark.parametrize("service", _SERVICES.values(), ids=_SERVICES.keys())


def _validate(path: Path) -> tuple[int, str]:
    outcome = run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(path))
    return outcome.returncode, outcome.stdout


def test_compose_file_is_valid_by_the_compose_specification() -> None:
    status, report = _validate(_COMPOSE_FILE)
    assert status == 0, report


def test_validator_refuses_a_misspelt_key(tmp_path: Path) -> None:
    misspelt = tmp_path / "compose.yaml"
    misspelt.write_text(_COMPOSE_FILE.read_text(encoding="utf-8").replace("stop_grace_period", "stop_grace"))
    status, report = _validate(misspelt)
    assert status != 0
    assert "stop_grace" in report


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_each_profile_starts_every_role(profile: str) -> None:
    roles = [_texts(s["command"])[0] for s in _SERVICES.values() if profile in _texts(s["profiles"])]
    assert sorted(roles) == ["decode", "gateway", "prefill"]


@each_service
def test_service_runs_a_real_command_with_real_settings(service: dict[str, Yaml]) -> None:
    command = _texts(service["command"])
    assert unknown_part(" ".join(["kvrelay", *command])) is None
    unknown = set(_mapping(service["environment"])) - environment_of(command[0])
    assert not unknown, f"kvrelay {command[0]} does not read {unknown}"


@pytest.mark.parametrize("name", [name for name in _SERVICES if name != "gateway"])
def test_worker_tells_the_gateway_where_it_is(name: str) -> None:
    environment = _mapping(_SERVICES[name]["environment"])
    assert environment["KVRELAY_HOST"] == "0.0.0.0"
    assert environment["KVRELAY_ADVERTISE_HOST"] == name, "an address to listen on is none to be reached at"
    gateway, port = str(environment["KVRELAY_GATEWAY"]).split(":")
    assert port == _mapping(_SERVICES[gateway]["environment"])["KVRELAY_PORT"]


@each_service
def test_healthcheck_asks_the_service_that_the_role_offers(service: dict[str, Yaml]) -> None:
    check = _mapping(service["healthcheck"])
    words = _texts(check["test"])
    assert words[:3] == ["CMD", "kvrelay", "health"]
    assert unknown_part(" ".join(words[1:])) is None
    assert words[words.index("--target") + 1] == f"127.0.0.1:{_mapping(service['environment'])['KVRELAY_PORT']}"

    asked = words[words.index("--service") + 1]
    protos = (path.read_text(encoding="utf-8") for path in (ROOT / "protos" / "kvrelay" / "v1").glob("*.proto"))
    offered = {f"kvrelay.v1.{name}" for text in protos for name in re.findall(r"^service (\w+)", text, re.MULTILINE)}
    assert asked in offered
    assert check["start_period"], "a model takes a while to load"


@each_service
def test_service_can_do_no_more_than_it_must(service: dict[str, Yaml]) -> None:
    user = str(service["user"])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that it needs no passwd entry, and not root"
    assert service["read_only"] is True
    assert _texts(service["cap_drop"]) == ["ALL"]
    assert "no-new-privileges:true" in _texts(service["security_opt"])
    assert service["init"] is True
    assert not {"privileged", "cap_add", "pid", "network_mode"} & set(service)


@each_service
def test_service_has_time_to_drain(service: dict[str, Yaml]) -> None:
    grace = re.fullmatch(r"(\d+)s", str(service["stop_grace_period"]))
    assert grace is not None
    assert int(grace[1]) >= _DRAIN_S + 10, "streams would be cut off"


@each_service
def test_only_the_gateway_is_reachable_and_only_from_this_machine(service: dict[str, Yaml]) -> None:
    published = _texts(service.get("ports", []))
    networks = _texts(service["networks"])
    if _texts(service["command"]) == ["gateway"]:
        assert published
        assert all(port.startswith("127.0.0.1:") for port in published)
    else:
        assert not published
        assert all(_mapping(_mapping(_COMPOSE["networks"])[name]).get("internal") for name in networks)


@each_service
def test_image_has_a_version_and_a_target_that_exists(service: dict[str, Yaml]) -> None:
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert project is not None
    build = _mapping(service["build"])
    assert service["image"] == f"kvrelay:{project[1]}-{build['target']}"
    dockerfile = (ROOT / str(build["dockerfile"])).read_text(encoding="utf-8")
    assert re.search(rf"^FROM \S+ AS {build['target']}$", dockerfile, re.MULTILINE)


@each_service
def test_volumes_are_declared(service: dict[str, Yaml]) -> None:
    assert isinstance(service["volumes"], list)
    named = {volume.split(":")[0] for volume in service["volumes"] if isinstance(volume, str)}
    assert named <= set(_mapping(_COMPOSE["volumes"]))


def test_there_are_images_to_check() -> None:
    assert _DOCKERFILES


@pytest.mark.parametrize("dockerfile", _DOCKERFILES, ids=lambda path: str(relative(path)))
def test_dockerfile_passes_hadolint(dockerfile: Path) -> None:
    lint = run_tool("hadolint", "--no-color", str(dockerfile))
    assert lint.returncode == 0, lint.stdout


def test_hadolint_refuses_an_unpinned_image(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp\n")
    assert run_tool("hadolint", "--no-color", str(bad)).returncode != 0


@pytest.mark.parametrize("dockerfile", _DOCKERFILES, ids=lambda path: str(relative(path)))
def test_image_is_pinned_and_ends_without_root(dockerfile: Path) -> None:
    text = dockerfile.read_text(encoding="utf-8")
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    stages = re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    names = {name for _, name, _ in stages}
    for image, _, _ in stages:
        pinned = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], image)
        assert image in names or re.search(r":\d+\.\d+\.\d+", pinned), f"{image} has no full version"
    final = {name: body for _, name, body in stages if name in {"cpu", "gpu"}}
    assert set(final) == {"cpu", "gpu"}
    assert all(re.search(r"^USER [1-9]\d*:[1-9]\d*$", body, re.MULTILINE) for body in final.values())


@pytest.mark.parametrize("dockerfile", _DOCKERFILES, ids=lambda path: str(relative(path)))
def test_build_context_has_every_package_and_what_is_copied(dockerfile: Path) -> None:
    copies = re.findall(r"^COPY (?!--from)(.+)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    sources = {source for line in copies for source in line.split()[:-1]}
    assert set(PACKAGES) <= sources
    allowed = {
        line[1:].rstrip("/")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    assert sources <= allowed, "the .dockerignore keeps these out of the build"
    assert all((ROOT / source).exists() for source in sources)


@pytest.mark.parametrize("dockerfile", _DOCKERFILES, ids=lambda path: str(relative(path)))
def test_image_has_the_compiler_that_the_kernels_are_built_with_and_builds_them(dockerfile: Path) -> None:
    text = dockerfile.read_text(encoding="utf-8")
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL))
    installed = re.search(r"apt-get install --yes --no-install-recommends ([^&]+?)\s*\\?\s*&&", stages["runtime"])
    assert installed is not None
    assert set(COMPILERS) & set(installed[1].split()), f"engine/kernels/cpu/build.py looks for {COMPILERS}"
    built = stages["cpu"].partition("python -m engine.kernels.cpu.prebuild")
    assert built[1], "each new container would compile first"
    assert "USER 10001" in built[0], "a cache of another user's is not trusted"


def test_setup_looks_for_the_compiler_that_the_kernels_are_built_with() -> None:
    script = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert f'in "${{CXX:-}}" {" ".join(COMPILERS)};' in script
