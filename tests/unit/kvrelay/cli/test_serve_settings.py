"""What `serve` hands on to the roles, and from which source."""

from pathlib import Path

import pytest

from kvrelay.cli.server.serve import config_path
from kvrelay.cli.server.serve_settings import ServeSettings, check_keys
from kvrelay.cluster.local import ClusterConfig
from kvrelay.errors import InvalidRequest
from kvrelay.serving.settings import parse_settings


def cluster(*argv: str) -> ClusterConfig:
    return parse_settings(ServeSettings, argv, "kvrelay serve").to_cluster(config_path(list(argv)))


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_nothing_is_handed_on_unless_it_was_given() -> None:
    config = cluster()
    assert (config.gateway_args, config.prefill_args, config.decode_args) == ([], [], [])
    assert (config.port, config.num_prefill, config.num_decode, config.restarts) == (50051, 1, 1, True)


def test_worker_flags_reach_both_tiers() -> None:
    config = cluster("--num-blocks", "64", "--kv-dtype", "bf16", "--transport", "grpc", "--prefill", "0")
    assert config.num_prefill == 0
    for args in (config.prefill_args, config.decode_args):
        assert list(args) == ["--transport", "grpc", "--num-blocks", "64", "--kv-dtype", "bf16"]
    assert config.gateway_args == []


def test_workers_on_one_gpu_take_equal_shares_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = cluster("--device", "cuda", "--decode", "3", "--weight-format", "int4")
    for args in (config.prefill_args, config.decode_args):
        assert list(args) == ["--device", "cuda", "--weight-format", "int4", "--gpu-memory-share", "0.25"]
    assert "--gpu-memory-share" not in cluster("--device", "cuda", "--prefill", "0").decode_args
    assert "--gpu-memory-share" not in cluster("--device", "cpu").decode_args
    given = cluster("--device", "cuda", "--gpu-memory-share", "0.3")
    assert list(given.decode_args) == ["--device", "cuda", "--gpu-memory-share", "0.3"]
    own = cluster("--device", "cuda", "--config", write(tmp_path, "decode:\n  gpu_memory_share: 0.7\n"))
    assert "--gpu-memory-share" not in own.decode_args
    assert "0.5" in own.prefill_args
    # Without a device named, only a machine with a driver has something to share.
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr("kvrelay.cli.server.serve_settings._NVIDIA_DRIVER", driver)
    assert list(cluster().decode_args) == []
    driver.touch()
    assert list(cluster().decode_args) == ["--gpu-memory-share", "0.5"]


def test_traces_go_to_the_collector_from_every_role() -> None:
    config = cluster("--otlp-endpoint", "http://127.0.0.1:4317")
    for args in (config.gateway_args, config.prefill_args, config.decode_args):
        assert list(args) == ["--otlp-endpoint", "http://127.0.0.1:4317"]


def test_role_reads_its_own_section_and_it_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "num_blocks: 8\nserve:\n  decode: 2\ndecode:\n  num_blocks: 16\n")
    config = cluster("--config", path)
    assert config.num_decode == 2
    assert list(config.decode_args) == ["--config", path]
    assert list(config.prefill_args) == ["--num-blocks", "8"]


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_config_is_found_in_every_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CONFIG", "other.yaml")
    assert config_path(form.format("a.yaml").split()) == Path("a.yaml")
    assert config_path([]) == Path("other.yaml")
    monkeypatch.delenv("KVRELAY_CONFIG")
    assert config_path([]) is None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("modle: x\nserve: {}\n", "modle"),
        ("gateway:\n  max_runing_requests: 3\n", "gateway.max_runing_requests"),
        ("prefill:\n  lease_ttl_s: 3\n", "prefill.lease_ttl_s"),
    ],
)
def test_key_that_no_role_knows_is_refused(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(InvalidRequest, match=f"unknown key '{key}'"):
        check_keys(Path(write(tmp_path, text)))


def test_keys_of_every_role_are_known(tmp_path: Path) -> None:
    shared = "max_num_seqs: 3\nmodel: x\n"
    sections = "gateway:\n  max_attempts: 2\ndecode:\n  lease_ttl_s: 3\nprefill:\nserve:\n  prefill: 2\n"
    check_keys(Path(write(tmp_path, shared + sections)))
