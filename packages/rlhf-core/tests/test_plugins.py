"""Finding parts by name or path, and saying what is near when there is none."""

import pytest
from rlhf_core import ROLLOUT_BACKENDS, PluginError, load_object, load_plugin, plugin_names
from rlhf_core.testing.fakes import ScriptedBackend


def test_a_path_needs_no_registration():
    assert load_plugin(ROLLOUT_BACKENDS, "rlhf_core.testing.fakes:ScriptedBackend") is ScriptedBackend


def test_nested_attributes():
    assert load_object("rlhf_core.testing.fakes:ScriptedBackend.close", what="method") is ScriptedBackend.close


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(PluginError, match=r"no 'nothing-like-it'.*module:attribute"):
        load_plugin("rlhf.no_such_group", "nothing-like-it")
    assert plugin_names("rlhf.no_such_group") == []


def test_a_near_miss_is_suggested(monkeypatch):
    from importlib.metadata import EntryPoint

    entries = [
        EntryPoint("vllm", "no_such_module:Backend", "g"),
        EntryPoint("scripted", "rlhf_core.testing.fakes:ScriptedBackend", "g"),
    ]
    monkeypatch.setattr("rlhf_core.plugins.entry_points", lambda group: entries)
    assert plugin_names("g") == ["scripted", "vllm"]
    assert load_plugin("g", "scripted") is ScriptedBackend
    with pytest.raises(PluginError, match="did you mean 'vllm'"):
        load_plugin("g", "vlm")
    with pytest.raises(PluginError, match=r"cannot be imported: ModuleNotFoundError.*no_such_module"):
        load_plugin("g", "vllm")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "module:function"),
        (":f", "module:function"),
        ("m:", "module:function"),
        ("no_such_module_here:f", "cannot be imported"),
        ("rlhf_core.plugins:load_plugim", "did you mean 'load_plugin'"),
    ],
)
def test_bad_paths(path, message):
    with pytest.raises(PluginError, match=message):
        load_object(path, what="reward function")


def test_the_current_directory_is_importable(tmp_path, monkeypatch):
    import sys

    (tmp_path / "module_of_this_test.py").write_text("def score(): return 5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_object("module_of_this_test:score", what="reward")() == 5
