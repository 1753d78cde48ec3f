"""The program in a response."""

import pytest
from rlhf_rollout import extract_code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx\n```", "x\n"),
        ("```python3\nx\n```", "x\n"),
        ("```Python title=a.py\nx\n```", "x\n"),
        ("```{.python}\nx\n```", "x\n"),
        ("~~~py\nx\n~~~", "x\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("1. So:\n   ```python\n   def f():\n       return 1\n   ```\n", "def f():\n    return 1\n"),
        ("So:\n```python\nx = 1\ny = 2", "x = 1\ny = 2\n"),
        ("```python\nold\n```\n```python\nnew\n```", "new\n"),
        ("```python\nx\n```\nIt prints:\n```\n1\n```", "x\n"),
        ("```\nx\n```", "x\n"),
        ("```python\nx\n```\n```", "x\n"),
        ("plain text", "plain text"),
        ("Use ``` `x` ``` here", "Use ``` `x` ``` here"),
        ("", ""),
    ],
)
def test_forms_of_fences(text, code):
    assert extract_code(text) == code


def test_another_language():
    text = "```python\nno\n```\n```cpp\nyes\n```\n```text\nout\n```"
    assert extract_code(text, ("cpp", "c++")) == "yes\n"
