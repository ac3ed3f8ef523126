"""The node file: sizes, durations, defaults, and errors that name the key and its line."""

import re
from pathlib import Path

import msgspec
import pytest

from dormouse.core.config import MIN_NBYTES, NodeConfig, parse_duration_ms, parse_nbytes
from dormouse.core.nodefile import load_config, parse_config
from dormouse.gpuserver.device.host.device import HostDevice
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import DEFAULT


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), (17, 17), ("2GiB", 2 << 30), ("512 MB", 512 * 10**6), ("1.5KiB", 1536), ("1gib", 1 << 30), ("7B", 7)],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XiB", "1e9", "one"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_nbytes(text)


@pytest.mark.parametrize("spaces", [" " * 10**6, "\t\n" * 10**6])
def test_spaces_take_as_long_as_they_are(spaces: str) -> None:
    assert parse_nbytes(f"{spaces}2{spaces}KiB{spaces}") == 2048
    assert parse_duration_ms(f"{spaces}2{spaces}s{spaces}") == 2000
    for parse in (parse_nbytes, parse_duration_ms):
        with pytest.raises(ConfigError):
            parse(f"2{spaces}!")


@pytest.mark.parametrize("text", ["8388608TiB", 10**30, "9" * 400 + "GB"])
def test_a_size_that_no_machine_has(text: str | int) -> None:
    with pytest.raises(ConfigError, match="is more than any machine has; write less than 8 EiB"):
        parse_nbytes(text)


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("80ms", 80), (80, 80), ("2s", 2000), ("1.5s", 1500), ("5m", 300_000), ("1h", 3_600_000)]
)
def test_durations(text: str | int, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1d"])
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration_ms(text)


@pytest.mark.parametrize("text", ["8761h", 10**30, "9" * 400 + "s"])
def test_a_duration_that_nobody_waits_for(text: str | int) -> None:
    with pytest.raises(ConfigError, match="is too long; write at most a year"):
        parse_duration_ms(text)


@pytest.mark.parametrize("text", [0, "0", "0s", "0.9ms"])
def test_a_duration_in_which_nothing_is_done(text: str | int) -> None:
    with pytest.raises(ConfigError, match="is too short; write at least 1ms"):
        parse_duration_ms(text)


def test_no_file_is_a_whole_node() -> None:
    config = NodeConfig()
    assert config.gpu_count >= 1
    assert config.gpu_nbytes > 0
    assert config.gpu_threads >= 1
    assert len(str(config.run_directory)) < 60
    assert parse_config({}) == config


def test_nodes_of_different_names_do_not_meet() -> None:
    one, two = (parse_config({"node": {"name": name}}) for name in ("one", "two"))
    assert one.run_directory != two.run_directory
    assert one.state_directory != two.state_directory


def write(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text)
    return path


def test_a_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, '[node]\nport = 0\n[gpu]\ncount = 3\nmemory = "1GiB"\nthreads = 2\n'))
    assert (config.node.port, config.gpu_count, config.gpu_nbytes, config.gpu_threads) == (0, 3, 1 << 30, 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff", "not UTF-8 text; write the node file as TOML"),
        (b"[node", "not TOML: "),
        (b"[node]\nport = " + b"9" * 5000, "not TOML: Exceeds the limit"),
        (b"[node]\nport = " + b"[" * 5000, "not TOML: "),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{path}: {says}"):
        load_config(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("memory = 1GiB", """in 'memory = 1GiB'; text is in double quotes: memory = "1GiB\""""),
        ("name = my node # mine", """; text is in double quotes: name = "my node\""""),
        ("count: 1", "in 'count: 1'; TOML has NAME = VALUE"),
        ("count =", "in 'count ='; a value is missing"),
        ("behind_proxy = True", "; write behind_proxy = true"),
        ("behind_proxy = off", "; write behind_proxy = false"),
        ("count = 1,000", "; a number is written as 1000 or 0.5"),
        ('name = "x', """in 'name = "x'"""),
        ("[gpu", "in '[gpu'"),
        ("a" * 100, f"in '{'a' * 60}'"),
    ],
)
def test_what_is_not_toml_is_shown_with_what_toml_has(tmp_path: Path, line: str, says: str) -> None:
    for text in (f"[node]\n{line}\n[gpu]\ncount = 1\n", f"[node]\n{line}"):
        with pytest.raises(ConfigError) as caught:
            load_config(write(tmp_path, text))
        assert re.search(r": not TOML: [^;]*\(at (line 2, column \d+|end of document)\), in ", str(caught.value))
        assert str(caught.value).endswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[gpu]\ncount = "two"', "; write a number, such as 0"),
        ("[gpu]\nmemory = 4", '; write a size in quotes, such as "4GiB"'),
        ('[limits]\ntimeout_ms = "1h"', "; write a number of milliseconds, such as 3600000"),
        ('[sandbox]\nread = "/data"', '; write a list of texts, such as ["one", "two"]'),
        ("[sandbox]\nread = [1]", '; write a list of texts, such as ["one", "two"]'),
        ("[gpu]\nfast_path = 1", "; write true or false"),
        ("[node]\nname = 1", '; write a text in quotes, such as "default"'),
    ],
)
def test_a_value_of_another_type_is_told_with_the_form_that_it_has(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"node\.toml:2: Expected `") as caught:
        load_config(write(tmp_path, text))
    assert str(caught.value).endswith(says)


def test_the_scheduler_is_set_and_has_defaults(tmp_path: Path) -> None:
    assert parse_config({}).schedule == DEFAULT
    assert (DEFAULT.passed_over_ms, DEFAULT.passed_over_share) == (30_000, 0.1)  # nobody waits for ever
    config = load_config(write(tmp_path, '[schedule]\norder = "fifo"\npassed_over_ms = 0\n'))
    assert config.schedule == msgspec.structs.replace(DEFAULT, order="fifo", passed_over_ms=0)
    assert msgspec.json.decode(msgspec.json.encode(config), type=NodeConfig) == config  # as node processes get it


def test_files_for_models() -> None:
    assert parse_config({}).disk_nbytes is None
    assert parse_config({"limits": {"disk": "0"}}).disk_nbytes == 0
    assert parse_config({"limits": {"disk": "2GB"}}).disk_nbytes == 2 * 10**9


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('[node]\nname = "x"\ncolour = "red"\n', 3, "colour"),
        (
            "[nodes]\n",
            1,
            "`nodes`; did you mean node? There are node, gpu, sandbox, limits, record, jobs, tracing, environments, "
            "tenants, schedule",
        ),
        ("[node]\nprot = 1\n", 2, "`prot` - at `$.node`; did you mean port? There are name, host, port, run,"),
        ("[gpu]\nport = 1\n", 2, "`port` - at `$.gpu`; it belongs into [node]"),
        ("pool = 1\n", 1, "`pool`; it belongs into [gpu]"),
        ("[other]\n", 1, "`other`; write some of node, gpu, sandbox"),
        ('[node]\nport = "high"\n', 2, "port"),
        ("[node]\nport = 70000\n", 2, "0 to 65535"),
        ('[node]\nname = "a b"\n', 2, "letters"),
        ('[gpu]\n\nmemory = "much"\n', 3, "gpu.memory"),
        ('[gpu]\ndevice = "tpu"\n', 2, "auto or cuda or host"),
        ('[gpu]\npool = "heap"\n', 2, "auto or regions or pages or buddy"),
        ('[gpu]\nswitch = "fast"\n', 2, "gpu.switch"),
        ('[gpu]\npeer = "fast"\n', 2, "gpu.peer"),
        ('[gpu]\nactivations = "some"\n', 2, "gpu.activations"),
        ('[node]\nsharing = "all"\n', 2, "none or tenant or node"),
        ("[limits]\nextra_instances = -1\n", 2, "limits.extra_instances is -1; write at least 0"),
        ("[limits]\n\nextra_idle_ms = 0\n", 3, "limits.extra_idle_ms is 0; write at least 1"),
        ("[limits]\nsessions = -1\n", 2, "limits.sessions is -1; write at least 0"),
        ("[limits]\nyield_ms = 0\n", 2, "limits.yield_ms is 0; write at least 1"),
        ("[limits]\nheartbeat_ms = 0\n", 2, "limits.heartbeat_ms is 0; write at least 1"),
        ("[jobs]\nkeep_ms = 0\n", 2, "jobs.keep_ms is 0; write a number from 1 to"),
        ('[jobs]\nstore = "much"\n', 2, "jobs.store"),
        ('[limits]\ndisk = "much"\n', 2, "limits.disk"),
        ('[tracing]\nendpoint = "collector:4318"\n', 2, "tracing.endpoint is 'collector:4318'; write http:// or"),
        ('[tracing]\nendpoint = "http://me:secret@h"\n', 2, "tracing.endpoint"),
        ("[tracing]\nshare = 2.0\n", 2, "tracing.share is 2.0; write a number from 0 to 1"),
        ("[gpu]\ncount = -1\n", 2, "0 to 64"),
        ('[limits]\nbody = ""\n', 2, "limits.body"),
        ('[gpu]\n[schedule]\norder = "lifo"\n', 3, "schedule.order is 'lifo'; write one of fifo, edf"),
        ("[schedule]\nwindow = 0\n", 2, "schedule.window is 0; write a number from 1 to 1099511627776"),
        ('[schedule]\nwindow = "all"\n', 2, "schedule.window"),
        ("[schedule]\n\npolicy = 1\n", 3, "`policy` - at `$.schedule`; write some of order, placement, eviction"),
        ('[gpu]\npool = "buddy"\nmemory = "127MiB"\n', 3, "gpu.memory is 127MiB, in which a pool of the kind buddy"),
        ('[gpu]\nmemory = "1MiB"\npool = "pages"\n', 2, "write at least 2MiB, or another gpu.pool"),
    ],
)
def test_errors_name_the_key_and_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f"{path}:{line}:" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("pool", MIN_NBYTES)
def test_the_least_memory_is_what_a_pool_can_use(pool: str) -> None:
    least = MIN_NBYTES[pool]
    for nbytes in (least, least - 1):
        device = HostDevice(nbytes, pool=pool)
        assert device.make_pool().capacity == (least if nbytes == least else 0)
        device.close()


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        load_config(write(tmp_path, "[node]\nname\n"))


def test_a_file_as_editors_on_windows_save_it(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes("\ufeff[node]\r\nport = 8701\r\n".encode())
    assert load_config(path).node.port == 8701


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node\.toml: No such file"):
        load_config(tmp_path / "node.toml")


@pytest.mark.parametrize("key", ["run", "state"])
def test_a_directory_that_depends_on_where_one_is(key: str) -> None:
    """The command would look for it in another place than the supervisor."""
    with pytest.raises(ConfigError, match=rf"node.toml:2: node.{key} is 'x/y'; write an absolute path"):
        parse_config({"node": {key: "x/y"}}, "node.toml", f"[node]\n{key} = 'x/y'\n")


@pytest.mark.parametrize("path", ["models", "/", "//", "/data/.."])
def test_directories_that_functions_may_not_be_given(path: str) -> None:
    with pytest.raises(ConfigError, match=r"sandbox.read has .*; write absolute paths of directories, not /"):
        parse_config({"sandbox": {"read": [path]}})
