"""Settings: sources and their order, errors that say what to change, help from the fields."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rtp.api import read_keys
from rtp.config import FrontendConfig, LocalConfig, MasterConfig, Settings, WorkerConfig
from rtp.core import plugins
from rtp.core.errors import ConfigError
from rtp.core.master.tenants import Terms
from rtp.core.types import Role
from rtp.settings import from_command_line, leaves, load, to_flags

KINDS = [MasterConfig, FrontendConfig, WorkerConfig, LocalConfig]


def test_a_later_source_wins(tmp_path: Path):
    file = tmp_path / "rtp.toml"
    file.write_text('port = 1\nlog_level = "error"\ndrain_s = 3\n[routing]\nname = "random"\n')
    environ = {"RTP_PORT": "2", "RTP_LOG_LEVEL": "debug", "RTP_ROUTING__NAME": "round_robin"}
    flags = ["--config", str(file), "--port", "3"]
    config = load(MasterConfig, flags, environ)
    assert (config.drain_s, config.log_level, config.port) == (3, "debug", 3)
    assert config.routing.name == "round_robin"
    assert load(MasterConfig, [*flags, "--set", "port=4"], environ).port == 4


def test_nested_and_free_parameters():
    config = load(MasterConfig, ["--routing.name=x", "--set", "routing.params.lam=0.5"], {})
    assert (config.routing.name, config.routing.params) == ("x", {"lam": 0.5})
    config = load(MasterConfig, ["--set", "routing.params.lam=0.5"], {})
    assert config.routing.name == "predicted_ttft", "parameters alone are for the default"
    config = load(WorkerConfig, ["--set", "params.eos_ids=[1,2]", "--set", "params.a=b c"], {})
    assert config.params == {"eos_ids": [1, 2], "a": "b c"}
    assert load(MasterConfig, ["--workers", "a:1, b:2"], {}).workers == ("a:1", "b:2")
    assert load(WorkerConfig, ["--role", "decode"], {}).role is Role.DECODE
    assert load(LocalConfig, ["--ask=false"], {}).ask is False
    assert load(LocalConfig, ["--ask"], {}).ask is True


@pytest.mark.parametrize(
    "field",
    ["max_queue_requests", "max_queue_tokens", "max_body_bytes", "drain_s", "max_ttft_s"],
)
@pytest.mark.parametrize("value", ["0", "-1", "abc", "nan", "inf", ""])
def test_a01_a_limit_that_is_none_is_a_start_up_error(field: str, value: str):
    with pytest.raises(ConfigError, match=field):
        load(MasterConfig, [f"--{field.replace('_', '-')}", value], {})


@pytest.mark.parametrize("field", ["max_batch_tokens", "max_rows", "block_size", "dp", "threads"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "abc"])
def test_a01_sizes_of_a_worker(field: str, value: str):
    with pytest.raises(ConfigError, match=field):
        load(WorkerConfig, ["--set", f"{field}={value}"], {})


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_keys_are_errors_everywhere(kind: type[Settings], tmp_path: Path):
    file = tmp_path / "rtp.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigError, match="prot is no setting"):
        load(kind, ["--config", str(file)], {})
    with pytest.raises(ConfigError, match="prot is no setting"):
        load(kind, ["--set", "prot=1"], {})
    with pytest.raises(ConfigError, match="RTP_PROT is no setting"):
        load(kind, [], {"RTP_PROT": "1"})
    with pytest.raises(SystemExit):
        load(kind, ["--prot", "1"], {})
    with pytest.raises(SystemExit):
        load(kind, ["--por", "1"], {})  # no abbreviations


def test_a_variable_of_another_entry_point_is_passed_over():
    assert load(MasterConfig, [], {"RTP_MODEL": "m", "RTP_CACHE": "/c", "PATH": ""}).port == 8000


def test_every_mistake_is_named_at_once():
    with pytest.raises(ConfigError) as error:
        load(MasterConfig, ["--port", "99999", "--log-level", "loud"], {})
    assert "port='99999'" in str(error.value)
    assert "log_level='loud'" in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load(MasterConfig, ["--config", str(tmp_path / "none.toml")], {})
    broken = tmp_path / "broken.toml"
    broken.write_text("port =")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load(MasterConfig, ["--config", str(broken)], {})


def test_the_world_is_let_in_only_with_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RTP_API_KEY", raising=False)
    secret = f"--secret-file={tmp_path / 's'}"
    needs = {
        MasterConfig: ("secret_file", "api_key_file", "$RTP_API_KEY"),
        FrontendConfig: ("secret_file", "api_key_file", "$RTP_API_KEY"),
        LocalConfig: ("secret_file", "api_key_file", "$RTP_API_KEY"),
        WorkerConfig: ("secret_file", "advertise"),
    }
    for kind in KINDS:
        with pytest.raises(ConfigError) as error:
            load(kind, ["--host", "0.0.0.0"], {})
        assert [need for need in needs[kind] if need not in str(error.value)] == []
        assert "README, Security" in str(error.value)
    for kind in (MasterConfig, FrontendConfig, LocalConfig):
        with pytest.raises(ConfigError, match="api_key_file"):
            load(kind, ["--host", "0.0.0.0", secret], {})
        assert load(kind, ["--host", "0.0.0.0", secret, "--api-key-file=k"], {}).host == "0.0.0.0"
    assert load(LocalConfig, ["--host", "::", secret, "--api-key-file=k"], {}).own_host == "::1"
    with pytest.raises(ConfigError, match="take a loopback"):
        load(LocalConfig, ["--host", "10.0.0.1", secret, "--api-key-file=k"], {})
    with pytest.raises(ConfigError, match="advertise"):
        load(WorkerConfig, ["--host", "::", secret], {})
    assert load(WorkerConfig, ["--host", "::", "--advertise=h:1", secret], {}).host == "::"


@pytest.mark.parametrize("address", ["nonsense host", "host", "ftp://h:1", "http://"])
def test_what_is_no_address_is_a_start_up_error(address: str):
    with pytest.raises(ConfigError, match="master="):
        load(WorkerConfig, ["--master", address], {})
    with pytest.raises(ConfigError, match="master="):
        load(FrontendConfig, ["--master", address], {})
    with pytest.raises(ConfigError, match="without TLS"):
        load(FrontendConfig, ["--master", "https://h:1"], {})
    assert load(MasterConfig, ["--frontend", "false"], {}).frontend is False


@pytest.mark.parametrize("kind", KINDS)
def test_help_tells_every_field(kind: type[Settings], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        from_command_line(kind, ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for path, field in leaves(kind):
        shown = "--" + ".".join(path).replace("_", "-") in text
        assert shown != bool(field.json_schema_extra.get("hidden")), path
        assert field.description, path
    assert "--parent" not in text
    assert re.search(r"--drain-s SECONDS +How long Ctrl-C or SIGTERM", text)
    if kind in (MasterConfig, LocalConfig):
        assert ", ".join(plugins.names("routing")) in " ".join(text.split())
    if kind in (WorkerConfig, LocalConfig):
        assert "--chunk-while-decoding TOKENS" in text
        assert "--steps-in-flight STEPS" in text
        assert "--dtype {auto,bf16,fp32}" in text
    if kind is WorkerConfig:
        assert re.search(r"--role \{[a-z,]*fusion[a-z,]*\}", text)


def test_a_mistake_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        from_command_line(LocalConfig, ["--workers", "0"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "workers='0'" in error


def test_flags_carry_settings_to_another_process():
    config = load(
        WorkerConfig,
        ["--model=m", "--dtype=fp32", "--set", "params.eos_ids=[1]", "--kv-tokens=64"],
        {},
    )
    names = [path[0] for path, _ in leaves(WorkerConfig)]
    assert load(WorkerConfig, to_flags(config, [*names, "params"]), {}) == config
    local = load(LocalConfig, ["--routing.name=x", "--set", "routing.params.a=[1,2]"], {})
    assert load(MasterConfig, to_flags(local, ["routing"]), {}).routing == local.routing


def test_terms_of_tenants_come_from_the_file_or_flags_and_reach_another_process(tmp_path: Path):
    file = tmp_path / "rtp.toml"
    file.write_text('[tenants."team.a"]\nweight = 2\ntokens_per_s = 500\n')
    flags = ["--config", str(file), "--default-tenant.max-waiting=9", "--set", "tenants.b.weight=3"]
    config = load(LocalConfig, flags, {"RTP_DEFAULT_TENANT__TOKENS_PER_S": "70"})
    named = {name: tenant.terms() for name, tenant in config.tenants.items()}
    assert named == {"team.a": Terms(weight=2.0, tokens_per_s=500.0), "b": Terms(weight=3.0)}
    assert config.default_tenant.terms() == Terms(tokens_per_s=70.0, max_waiting=9)
    again = load(MasterConfig, to_flags(config, ["default_tenant", "tenants", "limits"]), {})
    assert (again.tenants, again.default_tenant) == (config.tenants, config.default_tenant)


@pytest.mark.parametrize("field", ["weight", "tokens_per_s", "burst_tokens", "max_waiting"])
@pytest.mark.parametrize("value", ["0", "-1", "abc", "1e999"])
def test_a01_terms_that_mean_nothing_are_a_start_up_error(field: str, value: str):
    for tenant in ("default_tenant", "tenants.b"):
        with pytest.raises(ConfigError, match=rf"{tenant}\.{field}"):
            load(MasterConfig, ["--set", f"{tenant}.{field}={value}"], {})


def test_a01_a_burst_without_a_rate_is_a_start_up_error():
    with pytest.raises(ConfigError, match="burst_tokens needs tokens_per_s"):
        load(MasterConfig, ["--set", "tenants.b.burst_tokens=5"], {})


def test_api_keys_are_lines_of_a_file(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# who may\n\nk1\nk2 team-a\n")
    assert read_keys(file) == {"k1": "", "k2": "team-a"}
    for wrong in ("", "# none\n", "a b c\n"):
        file.write_text(wrong)
        with pytest.raises(ConfigError):
            read_keys(file)


def test_a_local_cluster_may_have_roles():
    flags = ["--workers=4", "--prefill=1", "--decode=2"]
    roles = load(LocalConfig, flags, {}).roles
    assert roles == (Role.PREFILL, Role.DECODE, Role.DECODE, Role.FUSION)
    with pytest.raises(ConfigError, match="more than workers, 2"):
        load(LocalConfig, ["--prefill=2", "--decode=1"], {})
    with pytest.raises(ConfigError, match="need decode workers"):
        load(LocalConfig, ["--prefill=1"], {})
