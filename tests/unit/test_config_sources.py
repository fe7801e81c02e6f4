"""TOML < environment < flags: which value wins, where it came from, and what a wrong one is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from homeprefixd import config_keys, config_sources, config_values
from homeprefixd.config import Config
from homeprefixd.config_sources import Flag, Loaded, Machine
from homeprefixd.errors import ConfigError
from homeprefixd.models import catalog

GIB = 1 << 30
Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`config_sources.load` on an imaginary machine, with the text of a file, variables and flags."""

    def loader(text: str | None = None, environ: dict[str, str] | None = None, **flags: str) -> Loaded:
        config_file = None
        if text is not None:
            file = tmp_path / "config.toml"
            file.write_text(text)
            config_file = Flag("--config", str(file))
        return config_sources.load(
            environ={"HOME": str(tmp_path / "home"), **(environ or {})},
            flags={key.replace("__", "."): Flag(f"--{key.split('__')[1]}", value) for key, value in flags.items()},
            config_file=config_file,
            machine=Machine(lambda: 16 * GIB, lambda path: 1000 * GIB),
            system_file=tmp_path / "etc.toml",
        )

    return loader


def refused(load: Load, *args: object, **flags: object) -> str:
    with pytest.raises(ConfigError) as error:
        load(*args, **flags)
    return str(error.value)


def test_nothing_given_is_the_defaults(load: Load) -> None:
    loaded = load()
    assert loaded.config == Config()
    assert loaded.file is None
    assert {origin.kind for origin in loaded.origins.values()} == {"default"}
    assert set(loaded.origins) == set(config_keys.keys())


def test_the_last_source_wins_and_is_remembered(load: Load, tmp_path: Path) -> None:
    text = '[server]\nport = 1001\nhost = "0.0.0.0"\ngrace = 5\n'
    environ = {"HOMEPREFIXD_SERVER_PORT": "1002", "HOMEPREFIXD_SERVER_HOST": "::1"}
    loaded = load(text, environ, server__port="1003")
    server = loaded.config.server
    assert (server.port, server.host, server.grace) == (1003, "::1", 5.0)
    assert str(loaded.origins["server.port"]) == "--port"
    assert str(loaded.origins["server.host"]) == "HOMEPREFIXD_SERVER_HOST"
    assert str(loaded.origins["server.grace"]) == f"{tmp_path}/config.toml:4"
    assert str(loaded.origins["server.keep_alive"]) == "default"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * GIB),
        ("20 gib", 20 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("500MB", 500_000_000),
        ("64KiB", 65536),
        ("1TiB", 1024 * GIB),
        ("10485760", 10485760),
        ("10485760B", 10485760),
        ("20G", None),
        ("GiB", None),
        ("-1GiB", None),
        ("1.5", None),
        ("1e9", None),
        ("20 apples", None),
        ("", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert config_values.parse_size(text) == size


def test_sizes_from_each_source(load: Load) -> None:
    loaded = load('[cache]\nhot = "2GiB"\nwarm = 4194304\n', {"HOMEPREFIXD_SERVER_MAX_BODY": "1MiB"}, cache__hot="1GiB")
    assert (loaded.config.cache.hot, loaded.config.cache.warm) == (GIB, 4194304)
    assert loaded.config.server.max_body == 1 << 20


def test_percentages_are_of_memory_and_of_the_disk(load: Load) -> None:
    cache = load('[cache]\nhot = "25%"\n', cache__warm="12.5 %").config.cache
    assert (cache.hot, cache.warm) == (4 * GIB, 125 * GIB)


def test_a_percentage_that_is_overridden_is_forgotten(load: Load) -> None:
    assert load('[cache]\nhot = "25%"\n', cache__hot="1GiB").config.cache.hot == GIB


def test_the_disk_is_that_of_the_cache_directory(tmp_path: Path) -> None:
    asked: list[Path] = []

    def disk(path: Path) -> int:
        asked.append(path)
        return GIB

    flags = {"cache.warm": Flag("--warm", "50%"), "cache.dir": Flag("--cache-dir", str(tmp_path))}
    loaded = config_sources.load(environ={}, flags=flags, machine=Machine(lambda: 0, disk), system_file=tmp_path / "no")
    assert loaded.config.cache.warm == GIB // 2
    assert asked == [tmp_path]


def test_this_machine_has_memory_and_a_disk_even_for_a_directory_to_come(tmp_path: Path) -> None:
    machine = config_sources.this_machine()
    assert machine.memory() > 1 << 26
    assert machine.disk(tmp_path / "not" / "there" / "yet") > 1 << 26


@pytest.mark.parametrize("path", ["model.ctx", "model.pool", "model.threads", "cache.hot", "cache.warm"])
def test_auto_is_zero(load: Load, path: str) -> None:
    section, name = path.split(".")
    loaded = load(f'[{section}]\n{name} = "auto"\n')
    assert getattr(getattr(loaded.config, section), name) == 0
    assert loaded.origins[path].kind == "file"


def test_choices_from_text(load: Load) -> None:
    config = load(
        environ={"HOMEPREFIXD_MODEL_FLASH_ATTENTION": "off", "HOMEPREFIXD_CACHE_REUSE": "exact"}, log__level="debug"
    ).config
    assert config.model.flash_attention == "off"
    assert config.cache.reuse == "exact"
    assert config.log.level == "debug"


@pytest.mark.parametrize("text", ["true", "1", "yes", "On"])
def test_truths_from_text(load: Load, text: str) -> None:
    assert load(environ={"HOMEPREFIXD_SERVER_ALLOW_OPEN": text}).config.server.allow_open is True
    assert load("[server]\nallow_open = true\n").config.server.allow_open is True
    assert load(environ={"HOMEPREFIXD_SERVER_ALLOW_OPEN": "off"}).config.server.allow_open is False


@pytest.mark.parametrize("text", ['"true"', "1", "[]"])
def test_a_truth_in_a_file_is_a_truth(load: Load, text: str) -> None:
    assert "true or false" in refused(load, f"[server]\nallow_open = {text}\n")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('cors_origins = "chat.home.lan"', "https://chat.home.lan"),
        ("ollama_port = 8080", "another than server.port"),
        ("ollama_port = 99999", "11434"),
        ('tls_key = "key.pem"', "server.tls_cert"),
    ],
)
def test_settings_of_the_server_that_cannot_be(load: Load, text: str, word: str) -> None:
    assert word in refused(load, f"[server]\n{text}\n")


def test_files_of_the_server_are_relative_to_the_file(load: Load, tmp_path: Path) -> None:
    text = '[server]\nkeys_file = "keys.toml"\ncors_origins = "https://a.lan, http://b.lan:3000 *"\n'
    assert load(text).config.server.keys_file == str(tmp_path / "keys.toml")


def test_paths_in_a_file_are_relative_to_it(load: Load, tmp_path: Path) -> None:
    config = load('[model]\npath = "m.gguf"\nchat_template = "{{ x }}"\n[cache]\ndir = "~/c"\n').config
    assert config.model.path == str(tmp_path / "m.gguf")
    assert config.model.chat_template == "{{ x }}"
    assert config.cache.dir == str(Path("~/c").expanduser())


def test_paths_in_flags_are_relative_to_where_one_is(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert load("", model__path="m.gguf").config.model.path == str(tmp_path / "here" / "m.gguf")


def test_no_model_is_no_path(load: Load) -> None:
    assert catalog.NO_MODEL == config_sources.NO_MODEL
    assert load("[model]\npath = 'none'\n").config.model.path == "none"


# ------------------------------------------------------------------------------------------------- which file is read


def test_files_in_their_order(tmp_path: Path) -> None:
    system = tmp_path / "etc.toml"
    user = tmp_path / "xdg" / "homeprefixd" / "config.toml"
    named = tmp_path / "named.toml"
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    find = config_sources.find_file
    assert find(environ, None, system) is None
    system.write_text("")
    assert find(environ, None, system) == system
    user.parent.mkdir(parents=True)
    user.write_text("")
    assert find(environ, None, system) == user
    named.write_text("")
    assert find({**environ, "HOMEPREFIXD_CONFIG": str(named)}, None, system) == named
    assert find({"HOMEPREFIXD_CONFIG": "/nowhere"}, Flag("--config", str(named)), system) == named
    assert config_sources.user_file({"HOME": "/h"}) == Path("/h/.config/homeprefixd/config.toml")
    assert config_sources.user_file({}) is None


def test_a_named_file_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"--config: there is no readable file /nowhere/c\.toml"):
        config_sources.find_file({}, Flag("--config", "/nowhere/c.toml"))
    with pytest.raises(ConfigError, match=r"HOMEPREFIXD_CONFIG: there is no readable file /nowhere"):
        config_sources.find_file({"HOMEPREFIXD_CONFIG": "/nowhere"})


def test_cache_directory() -> None:
    find = config_sources.cache_directory
    environ = {"CACHE_DIRECTORY": "/var/cache/a:/var/cache/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}
    assert find("/given", environ) == Path("/given")
    assert find("", environ) == Path("/var/cache/a")
    del environ["CACHE_DIRECTORY"]
    assert find("", environ) == Path("/x/homeprefixd")
    del environ["XDG_CACHE_HOME"]
    assert find("", environ) == Path("/h/.cache/homeprefixd")
    with pytest.raises(ConfigError, match=r"set cache\.dir"):
        find("", {})


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("[server]\nhost = '::'\nprot = 1", 3, ["server.prot", "did you mean port?", "[server] has host, port"]),
        ("\n[sever]\nport = 1", 2, ["there is no section or setting sever", "did you mean server?", "[cache]"]),
        ("port = 1", 1, ["port belongs below [server]"]),
        ("server = 3", 1, ["server is a section", "[server]"]),
        ("[cache]\nctx = 1", 2, ["cache.ctx", "did you mean model.ctx?"]),
        ("[server]\nport = '80'", 2, ["server.port", "'80'", "a whole number"]),
        ("[server]\nport = true", 2, ["server.port", "True", "a whole number"]),
        ("[server]\n\nport = 70000", 3, ["server.port", "70000", "1 to 65535"]),
        ("[server]\ngrace = 'long'", 2, ["server.grace", "a number of seconds"]),
        ("[server]\ngrace = nan", 2, ["server.grace", "a number of seconds"]),
        ("[server]\ngrace = -1", 2, ["server.grace", "0 to 3600"]),
        ("[model]\npath = 3", 2, ["model.path", "text"]),
        ("[model]\nflash_attention = 1", 2, ["model.flash_attention", "auto, on, off"]),
        ("[model]\nkv_type = 'q8'", 2, ["model.kv_type", "'q8'", "q8_0, q4_0"]),
        ("[model]\nbatch = 100", 2, ["model.batch", "a multiple of 64"]),
        ("[model]\nbatch = 96", 2, ["model.batch", "a multiple of 64"]),
        ("[model]\nctx = 63", 2, ["model.ctx", "at least 64 tokens"]),
        ("[model]\nctx = 100000000", 2, ["model.ctx cannot be 100000000", "at most 67108864"]),
        ("[model]\npool = 300000000", 2, ["model.pool", "at most 268435456"]),
        ("[model]\nalias = 'a\\u001bb'".replace("'", '"'), 2, ["model.alias", "without control characters"]),
        ("[server]\nmax_body = '2TiB'", 2, ["server.max_body", "1KiB to 1TiB"]),
        ("[records]\nfile_size = '2TiB'", 2, ["records.file_size", "4KiB to 1TiB"]),
        ("[model]\nparallel = -1", 2, ["model.parallel", "1 to 64"]),
        ("[model]\nparallel = 65", 2, ["model.parallel", "1 to 64"]),
        ("[cache]\nhot = '20G'", 2, ["cache.hot", "'20G'", "20GiB", "a share of memory such as 10%", "auto"]),
        ("[cache]\nwarm = '0%'", 2, ["cache.warm", "more than 0%"]),
        ("[cache]\nwarm = '101%'", 2, ["cache.warm", "at most 100%"]),
        ("[cache]\nwarm = -1", 2, ["cache.warm", "20GiB"]),
        ("[cache]\nwrite_queue = '10%'", 2, ["cache.write_queue", "20GiB"]),
        ("[cache]\nhot = 7", 2, ["cache.hot", "at least 1MiB"]),
        ("[cache]\nreuse = 'tokens'", 2, ["cache.reuse", "token, exact, off", "did you mean token?"]),
        ("[cache]\nreuse = []", 2, ["cache.reuse", "token, exact, off"]),
        ("[model]\npool = 100\nctx = 128", 2, ["model.pool", "100", "at least model.ctx (128"]),
    ],
)
def test_the_file_is_refused_with_line_key_and_what_is_allowed(
    load: Load, tmp_path: Path, text: str, line: int, parts: list[str]
) -> None:
    message = refused(load, text)
    assert message.startswith(f"{tmp_path}/config.toml:{line}: ")
    for part in parts:
        assert part in message
    assert "\n" not in message


def test_broken_toml_and_broken_text(load: Load, tmp_path: Path) -> None:
    assert "is not TOML" in refused(load, "[server\n")
    assert "line 2" in refused(load, "\nport = = 1\n")
    file = tmp_path / "latin1.toml"
    file.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        config_sources.load(environ={}, config_file=Flag("--config", str(file)))


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("HOMEPREFIXD_SERVER_PROT", "1", ["did you mean HOMEPREFIXD_SERVER_PORT?"]),
        ("HOMEPREFIXD_PORT", "1", ["there is no such variable"]),
        ("HOMEPREFIXD_SERVER_PORT", "eighty", ["server.port", "'eighty'", "a whole number"]),
        ("HOMEPREFIXD_SERVER_PORT", "", ["server.port", "a whole number"]),
        ("HOMEPREFIXD_MODEL_FLASH_ATTENTION", "maybe", ["auto, on, off"]),
        ("HOMEPREFIXD_CACHE_TAIL_DELAY", "1s", ["cache.tail_delay", "'1s'", "seconds"]),
        ("HOMEPREFIXD_LOG_LEVEL", "warn", ["did you mean warning?"]),
    ],
)
def test_variables_are_refused_by_name(load: Load, name: str, value: str, parts: list[str]) -> None:
    message = refused(load, None, {name: value})
    assert message.startswith(f"{name}: ")
    for part in parts:
        assert part in message


def test_documented_other_variables_are_no_settings(load: Load) -> None:
    assert load(environ={"HOMEPREFIXD_DEBUG_LOGITS": "1", "UNRELATED": "x"}).config == Config()


def test_flags_are_refused_by_name(load: Load) -> None:
    assert refused(load, server__port="0x50").startswith("--port: server.port cannot be '0x50'")


def test_port_zero_is_any_free_port(load: Load) -> None:
    assert load(server__port="0").config.server.port == 0


def test_quantised_kv_needs_flash_attention(load: Load) -> None:
    assert load(model__kv_type="q8_0").config.model.kv_type == "q8_0"
    assert load("[model]\nflash_attention = 'off'\nkv_type = 'f32'\n").config.model.kv_type == "f32"
    message = refused(load, "[model]\nflash_attention = 'off'\n", None, model__kv_type="q8_0")
    assert message.startswith("--kv_type: model.kv_type 'q8_0' needs flash attention, which is off by")
    assert "config.toml:2" in message


def test_k_and_v_have_types_of_their_own(load: Load) -> None:
    """It is V that needs flash attention."""
    model = load("[model]\nkv_type = 'q8_0'\nkv_type_v = 'f16'\nflash_attention = 'off'").config.model
    assert (model.kv_type, model.type_v, load().config.model.type_v) == ("q8_0", "f16", "f16")
    message = refused(load, "[model]\nkv_type_v = 'iq4_nl'\nflash_attention = 'off'")
    assert "model.kv_type_v 'iq4_nl' needs flash attention" in message
    assert "model.kv_type_v to one of f16, bf16, f32" in message
    assert "iq4_nl, q5_0, q5_1, empty" in refused(load, "[model]\nkv_type_v = 'q8'")


def test_every_setting_can_be_given_by_variable(load: Load) -> None:
    """Each key's own default, as text, comes back as itself with the variable as its origin."""
    for path, key in config_keys.keys().items():
        loaded = load(environ={key.variable: str(key.default)})
        assert loaded.origins[path].name == key.variable
        assert getattr(getattr(loaded.config, key.section), key.name) == key.default


@pytest.mark.parametrize("key", ["hot", "warm"])
def test_sizes_that_no_process_can_map_are_refused(load: Load, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"cache\.{key} cannot be '65TiB'; allowed: at most 64TiB"):
        load(f'[cache]\n{key} = "65TiB"\n')


@pytest.mark.parametrize("value", ["a\0b", "/x/z\udcff"])
def test_text_that_no_path_can_be_is_refused(load: Load, value: str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.dir cannot be .*UTF-8 without NUL"):
        load(None, {"HOMEPREFIXD_CACHE_DIR": value})


# ------------------------------------------------------------------------------------------------- several models

LISTED = """
[model]
ctx = 1024
keep_alive = 60
[[models.list]]
path = "one.gguf"
[[models.list]]
alias = "two"
path = "/m/two.gguf"
ctx = 2048
keep_alive = -1
gpu_layers = "auto"
[models]
dir = "folder"
memory = "50%"
"""


def test_models_are_listed_with_settings_of_their_own(load: Load, tmp_path: Path) -> None:
    config = load(LISTED).config
    one, two = config.models.entries
    assert (one.path, one.alias, one.ctx, one.keep_alive) == (str(tmp_path / "one.gguf"), "", 1024, 0)
    assert (two.path, two.alias, two.ctx, two.keep_alive, two.gpu_layers) == ("/m/two.gguf", "two", 2048, -1, -2)
    assert (config.models.dir, config.models.memory) == (str(tmp_path / "folder"), 8 * GIB)


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("[models]\nlist = 3", 2, ["models.list is a list of tables", "[[models.list]]"]),
        ("[models.list]\npath = 'x'", 1, ["models.list is a list of tables"]),
        ("[[models]]\npath = 'x'", 1, ["models is a section"]),
        ("[[models.list]]\npath = 'x'\n[[models.list]]\npaht = 'y'", 4, ["no setting paht", "did you mean path?"]),
        ("[[models.list]]\npath = 'x'\n[[models.list]]\nctx = 64", 3, ["needs path"]),
        ("[[models.list]]\npath = 'x'\nctx = 3", 3, ["model.ctx cannot be 3", "at least 64"]),
        ("[[models.list]]\npath = 'none'", 2, ["a GGUF file"]),
        ("[[models.list]]\npath = 'x'\nkeep_alive = -2", 3, ["model.keep_alive", "-1 to load it at the start"]),
        ("[models]\nmemory = 7", 2, ["models.memory", "at least 64MiB"]),
        ("[models]\nfolder = 'x'", 2, ["there is no setting models.folder", "[models] has dir, memory, list"]),
        ("[model]\ngpu_layers = 'all'", 2, ["model.gpu_layers", "a whole number, or auto"]),
        ("[model]\ngpu_layers = -3", 2, ["model.gpu_layers", "-1 for all, or auto"]),
    ],
)
def test_models_are_refused_with_line_and_what_is_allowed(
    load: Load, tmp_path: Path, text: str, line: int, parts: list[str]
) -> None:
    message = refused(load, text)
    assert message.startswith(f"{tmp_path}/config.toml:{line}: "), message
    for part in parts:
        assert part in message


# ------------------------------------------------------------------------------------------------------- adapters


def test_adapters_of_models(load: Load, tmp_path: Path) -> None:
    text = """
[[model.adapters]]
id = 7
path = "a.gguf"
[[models.list]]
path = "one.gguf"
adapters = [{ id = "x", path = "/m/x.gguf", scale = 2, default = true, alias = "one-x" }]
[[models.list]]
path = "two.gguf"
"""
    config = load(text).config
    [own] = config.model.adapters
    assert (own.id, own.path, own.scale, own.default, own.alias) == ("7", str(tmp_path / "a.gguf"), 1.0, False, "")
    one, two = config.models.entries
    assert [(adapter.id, adapter.path, adapter.scale, adapter.alias) for adapter in one.adapters] == [
        ("x", "/m/x.gguf", 2.0, "one-x")
    ]
    assert two.adapters == []
    given = load(None, {"HOMEPREFIXD_MODEL_ADAPTERS": '[{id="e", path="/e.gguf"}]'}).config.model.adapters
    assert [(adapter.id, adapter.path) for adapter in given] == [("e", "/e.gguf")]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("3", "a list of tables"),
        ('["a"]', "a list of tables"),
        ('[{id = "a"}]', "needs path"),
        ('[{path = "a"}]', "needs id"),
        ('[{id = "", path = "a"}]', "needs id"),
        ('[{id = "a b", path = "a"}]', "without spaces"),
        ('[{id = "a", path = "a", alias = "b\\nc"}]', "alias 'b\\nc' of a: control characters are not allowed"),
        ('[{id = "a", path = "a", scale = "x"}]', "scale of an adapter cannot be 'x'"),
        ('[{id = "a", path = "a", scale = 1e9}]', "-100 to 100"),
        ('[{id = "a", path = "a", scale = nan}]', "-100 to 100"),
        ('[{id = "a", path = "a", scale = true}]', "scale of an adapter cannot be True"),
        ('[{id = "a", path = "a", weight = 1}]', "an adapter has no weight; it has id, path"),
        ('[{id = "a", path = "a"}, {id = "a", path = "b"}]', "two adapters have the id 'a'"),
    ],
)
def test_adapters_are_refused_with_what_is_allowed(load: Load, tmp_path: Path, value: str, words: str) -> None:
    message = refused(load, f"[model]\nadapters = {value}")
    assert message.startswith(f"{tmp_path}/config.toml:2: model.adapters: "), message
    assert words in message
    message = refused(load, None, {"HOMEPREFIXD_MODEL_ADAPTERS": value})
    assert message.startswith("HOMEPREFIXD_MODEL_ADAPTERS: model.adapters: ")
    assert words in message


# ------------------------------------------------------------------------------------------------- control vectors


def test_control_vectors_of_models(load: Load, tmp_path: Path) -> None:
    config = load("""
[[model.control_vectors]]
path = "calm.gguf"
scale = -0.5
first_layer = 3
[[models.list]]
path = "one.gguf"
control_vectors = [{ path = "/m/x.gguf", last_layer = 9 }]
[[models.list]]
path = "two.gguf"
""").config
    [own] = config.model.control_vectors
    assert (own.path, own.scale, own.first_layer, own.last_layer) == (f"{tmp_path}/calm.gguf", -0.5, 3, 0)
    one, two = config.models.entries
    assert [(vector.path, vector.scale, vector.last_layer) for vector in one.control_vectors] == [("/m/x.gguf", 1.0, 9)]
    assert two.control_vectors == []
    given = load(None, {"HOMEPREFIXD_MODEL_CONTROL_VECTORS": '[{path="/e.gguf"}]'}).config.model.control_vectors
    assert [vector.path for vector in given] == ["/e.gguf"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("3", "it is a list of tables"),
        ("[{scale = 1}]", "needs path"),
        ('[{path = "a", layer = 1}]', "has no layer; it has path, scale, first_layer, last_layer"),
        ('[{path = "a", scale = "much"}]', "scale of a control vector cannot be 'much'"),
        ('[{path = "a", scale = true}]', "scale of a control vector cannot be True"),
        ('[{path = "a", scale = 1e9}]', "scale of a cannot be 1e+09; allowed: -1000 to 1000"),
        ('[{path = "a", scale = nan}]', "scale of a cannot be nan"),
        ('[{path = "a", first_layer = -1}]', "first_layer of a cannot be -1; allowed: 1 to 10000"),
        ('[{path = "a", first_layer = 5, last_layer = 4}]', "first_layer 5 comes after last_layer 4"),
    ],
)
def test_control_vectors_are_refused_with_what_is_allowed(load: Load, tmp_path: Path, value: str, words: str) -> None:
    message = refused(load, f"[model]\ncontrol_vectors = {value}")
    assert message.startswith(f"{tmp_path}/config.toml:2: model.control_vectors: "), message
    assert words in message
    message = refused(load, None, {"HOMEPREFIXD_MODEL_CONTROL_VECTORS": value})
    assert message.startswith("HOMEPREFIXD_MODEL_CONTROL_VECTORS: model.control_vectors: ")


def test_a_home_that_nobody_has_is_a_name_like_others(load: Load, tmp_path: Path) -> None:
    config = load('[model]\npath = "~nobody-has-this-name/m.gguf"\n').config
    assert config.model.path == str(tmp_path / "~nobody-has-this-name" / "m.gguf")
