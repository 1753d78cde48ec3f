import subprocess
import sys

import rlhf_algos


def test_all_is_sorted_complete_and_importable():
    names = rlhf_algos.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name.lower() == name, name))
    assert all(hasattr(rlhf_algos, name) for name in names)


def test_importing_the_package_imports_nothing_optional():
    script = (
        "import sys, rlhf_algos\n"
        "found = {'peft', 'ray', 'vllm', 'deepspeed', 'datasets', 'trl', 'tensorboardX'} & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
