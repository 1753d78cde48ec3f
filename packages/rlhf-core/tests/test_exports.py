"""The public names, the error tree, and what importing the package does not import."""

import subprocess
import sys

import pytest
import rlhf_core
import rlhf_core.errors


def test_all_is_sorted_complete_and_without_duplicates():
    names = rlhf_core.__all__
    constants = [name for name in names if name.isupper()]
    classes = [name for name in names if not name.isupper() and name[0].isupper()]
    functions = [name for name in names if name[0].islower()]
    assert names == sorted(constants) + sorted(classes) + sorted(functions)
    assert len(set(names)) == len(names)
    assert all(hasattr(rlhf_core, name) for name in names)


def test_no_public_name_is_left_out_of_all():
    import types

    public = {
        name
        for name, value in vars(rlhf_core).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(rlhf_core.__all__)


def test_the_seams_are_pinned():
    """Adding a method to a seam breaks every implementation elsewhere: a change here is a change of interface."""
    assert methods(rlhf_core.RolloutBackend) == {
        "capabilities", "close", "connect", "generate", "pause", "receive_weights", "resume", "sleep", "wake",
        "weight_version",
    }  # fmt: skip
    assert methods(rlhf_core.ScoresTokens) == {"score_tokens"}
    assert methods(rlhf_core.SpansHosts) == {"part"}
    assert methods(rlhf_core.EnginePart) == {"close", "wait"}
    assert methods(rlhf_core.TrainEngine) == {
        "capabilities", "close", "export", "load", "offload", "reload", "save", "score", "step", "weights"
    }  # fmt: skip
    assert methods(rlhf_core.SendsAdapters) == {"adapter_weights"}
    assert methods(rlhf_core.ScoresWithoutAdapters) == {"score_without_adapters"}
    assert methods(rlhf_core.SavesInBackground) == {"save_in_background"}
    assert methods(rlhf_core.KeepsAverage) == {"export_average"}
    assert methods(rlhf_core.ReportsMemory) == {"memory_report"}
    assert methods(rlhf_core.NeedsEnvVars) == {"env_vars"}
    assert methods(rlhf_core.Closable) == {"close"}
    assert methods(rlhf_core.RewardFunction) == {"score"}
    assert methods(rlhf_core.Environment) == {"reset", "step"}
    assert methods(rlhf_core.WeightSource) == {"gather", "manifest"}


def methods(protocol) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


def test_the_error_tree_in_the_docstring_is_the_real_one():
    def draw(cls, depth=0):
        yield depth, cls.__name__
        for child in cls.__subclasses__():
            if child.__module__ == "rlhf_core.errors":
                yield from draw(child, depth + 1)

    drawn = []
    for line in rlhf_core.errors.__doc__.splitlines()[2:]:
        name = line.lstrip("│├└─ ").split(" ")[0]
        if name:
            drawn.append(((len(line) - len(line.lstrip("│├└─ "))) // 4, name))
    assert drawn == list(draw(rlhf_core.RLHFError))


@pytest.mark.stack
def test_importing_it_imports_no_optional_dependency():
    code = (
        "import sys, rlhf_core, rlhf_core.testing; "
        "print([m for m in ('transformers', 'pytest', 'ray', 'vllm', 'deepspeed', 'peft') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
