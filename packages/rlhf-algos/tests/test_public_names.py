import subprocess
import sys
from pathlib import Path

import pytest
import rlhf_algos

API = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").split()
"""What the package offers, a name a line; a change there is a change that users see."""


def test_the_api_is_what_the_list_says():
    assert rlhf_algos.__all__ == API


def test_all_is_sorted_and_importable():
    names = rlhf_algos.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name.lower() == name, name))
    assert all(hasattr(rlhf_algos, name) for name in names)


def test_no_name_is_also_a_module_or_folder():
    root = Path(rlhf_algos.__file__).parent
    inside = {path.stem for path in root.iterdir() if path.stem != "__init__"}
    assert not inside & set(rlhf_algos.__all__)


def test_every_registered_name_has_its_function_and_config_in_the_api():
    registered = [
        *(item for row in rlhf_algos.POLICY_LOSSES.values() for item in row),
        *(item for method in rlhf_algos.METHODS.values() for item in (method.function, method.config)),
        *(kind for kind, _ in rlhf_algos.NAMED_RECIPES.values()),
    ]
    missing = {item.__name__ for item in registered} - set(rlhf_algos.__all__)
    assert not missing


@pytest.mark.stack
def test_importing_the_package_imports_nothing_optional():
    script = (
        "import sys, rlhf_algos\n"
        "heavy = {'peft', 'ray', 'vllm', 'deepspeed', 'datasets', 'transformers', 'trl', 'tensorboardX', 'rich'}\n"
        "found = heavy & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
