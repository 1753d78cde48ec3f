"""Shapes in signatures are checked while core's tests run, unless other tests have imported the package before."""

import sys
from pathlib import Path

# The modules that compute with tensors. Others name Protocols, which cannot be checked at run time.
WITH_SHAPES = ["data.batch", "interfaces.loss", "model.linear_head", "model.log_probs", "model.packing"]

if "rlhf_core" not in sys.modules:
    from jaxtyping import install_import_hook

    # The numeric tower: an int is welcome where a float is.
    checker = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
    install_import_hook([f"rlhf_core.{name}" for name in WITH_SHAPES], checker)

# Modules beside the tests of model families.
sys.path.append(str(Path(__file__).parent / "families"))
