"""What CI runs: `uv run --locked nox`. `nox -s quick` is the subset to run while editing."""

import os
import sys
import tempfile
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
TEST_GROUP = [
    need
    for need in tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["test"]
    if isinstance(need, str) and not need.startswith("rlhf-")
]
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "typecheck", "api", "tests", "algos_alone", "own_backend"]
EXTRAS = {
    "rlhf-core": "[testing,lora]",
    "rlhf-algos": "[testing,lora]",
    "rlhf-rollout": "[gymnasium,mcp]",
    "rlhf-train": "[liger]",
}
"""What `lowest` installs beside each package's own needs."""
# One thread per process: several processes of several threads spin against each other on few cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@nox.session
def lint(session):
    """Format, lint, layering, dependencies."""
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports", "--no-logo")


@nox.session
def typecheck(session):
    """Types of the five packages."""
    session.run("pyright")


@nox.session
def api(session):
    """The public API against each package's last release: a break must stand in its changelog."""
    session.run("python", "tests/api/api_breaks.py")


@nox.session
def docs(session):
    """Write the pages of docs/ that are made from the code; the tests fail where they are stale."""
    session.run("python", "-m", "rlhf_launch.cli.configuration", env=ENVIRONMENT)


@nox.session
def quick(session):
    """Everything that starts no engine and no process, on all cores: under two minutes on two."""
    session.run("pytest", "-q", "-m", "not stack", "-n", "auto", *session.posargs, env=ENVIRONMENT)


@nox.session
def tests(session):
    """The whole suite, real engines included: two files at a time, as one mostly waits for processes to start."""
    # The last lines say what failed: neither warnings of other libraries nor skipped tests stand there.
    closing = ["-rfE", "--disable-warnings", "--durations=10"]
    session.run("pytest", "-n", "2", "--dist", "loadfile", *closing, *session.posargs, env=ENVIRONMENT)


@nox.session
def chaos(session):
    """Runs killed at random moments and resumed until done, compared to the bit with one that was left alone."""
    session.run("python", "packages/rlhf-launch/tests/chaos", *session.posargs, env=ENVIRONMENT)


@nox.session
def faults(session):
    """Workers, Ray's processes and hosts are killed under real runs; prints what each fault costs."""
    session.run("python", "packages/rlhf-launch/tests/faults/measure.py", *session.posargs, env=ENVIRONMENT)


@nox.session
def attacks(session):
    """Every attack on the sandbox, as root and as nobody, with and without user namespaces; prints the table."""
    session.run(
        "python", "packages/rlhf-rollout/tests/sandbox/attacks/everywhere.py", *session.posargs, env=ENVIRONMENT
    )


@nox.session(venv_backend="uv")
def fuzz(session):
    """Requests made from the gateway's schema, right and wrong ones; `-- --examples 20000` for hours of it."""
    session.run_install(
        *["uv", "sync", "-q", "--locked", "--group", "fuzz"],
        external=True,
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
    )
    session.run("python", "packages/rlhf-rollout/tests/gateway/fuzz.py", *session.posargs, env=ENVIRONMENT)


@nox.session
def families(session):
    """Every model type against its own logits, those of vLLM after weight syncs; writes docs/families.md."""
    for script in ("rlhf-core/tests/families/write_table.py", "rlhf-rollout/tests/families/write_engine_table.py"):
        session.run("python", f"packages/{script}", "docs/families.md", *session.posargs, env=ENVIRONMENT)


@nox.session
def recipes(session):
    """Every recipe of examples/recipes on a tiny model, three seeds; prints the table of docs/recipes.md."""
    session.run("python", "examples/recipes/tiny.py", *(session.posargs or ["--seeds", "3"]), env=ENVIRONMENT)


@nox.session
def vectors(session):
    """Write the frozen vectors of losses and estimators; the tests fail where they are stale."""
    script = "packages/rlhf-algos/tests/vectors/write_vectors.py"
    session.run("python", script, "packages/rlhf-algos/src/rlhf_algos/testing/vectors", env=ENVIRONMENT)


@nox.session(venv_backend="uv")
def gpu(session):
    """Every check that needs GPUs, with the CUDA builds; prints tables for docs/gpu.md. `-- --list` names them."""
    if {"--list", "--here"} & set(session.posargs):  # nothing to install: this environment's Python
        arguments = [argument for argument in session.posargs if argument != "--here"]
        session.run(sys.executable, "tests/gpu", *arguments, external=True, env=ENVIRONMENT)
        return
    session.run_install(
        *["uv", "sync", "-q", "--locked", "--no-group", "cpu", "--group", "cuda"],
        external=True,
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
    )
    session.run("python", "tests/gpu", *session.posargs, env=ENVIRONMENT)


@nox.session(venv_backend="uv")
def lowest(session):
    """The lowest versions that the packages say they take, and the tests that need no engine.

    Left out are the model families, whose page is that of the locked version of Transformers, and the plans of runs
    with vLLM, which takes one version of torch alone.
    """
    packages = [f"{ROOT}/packages/{name}{EXTRAS.get(name, '')}" for name in PACKAGES]
    # Elsewhere than here, where the workspace overrides the version of torch.
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        session.install("--resolution", "lowest-direct", *(f"-e{package}" for package in packages))
        session.install(*TEST_GROUP)
    left_out = (
        "rlhf-core/tests/families",
        "rlhf-launch/tests/planning",
        "rlhf-launch/tests/placement/test_overview.py",
    )
    arguments = session.posargs or ["packages", *(f"--ignore=packages/{path}" for path in left_out)]
    session.run("pytest", "-q", "-m", "not stack", "-n", "auto", *arguments, env=ENVIRONMENT)


@nox.session(venv_backend="uv")
def algos_alone(session):
    """DPO and KTO in an environment that holds only the rlhf-algos wheel and what it needs."""
    session.install("-c", constraints(session, "rlhf-algos"), *wheels(session, "rlhf-algos"))
    session.run("python", "tests/wheels/algos_alone.py", env=ENVIRONMENT)


@nox.session(venv_backend="uv")
def own_backend(session):
    """A rollout backend from another distribution, chosen by its entry point; everything from wheels."""
    session.install(
        "-c",
        constraints(session, "rlhf-launch"),
        *wheels(session, "rlhf-launch"),
        wheel(session, ROOT / "examples" / "rollout-backend"),
        *("pytest", "pytest-timeout"),
    )
    session.run("pytest", "-q", "examples/rollout-backend/tests", env=ENVIRONMENT)
    session.run("python", "tests/wheels/own_backend.py", env=ENVIRONMENT)


@nox.session(venv_backend="uv")
@nox.parametrize(
    "published",
    [
        "verifiers==0.4.0",
        "openai-agents==0.24.0",
        "langchain==1.4.7 langchain-openai==1.7.3",
        "openenv-core==0.3.0",
    ],
)
def agents(session, published):
    """Environments and agents of others against the real packages; some want different clients of OpenAI."""
    trained = "langchain" in published  # by a run of the whole stack
    session.install(
        *wheels(session, "rlhf-launch" if trained else "rlhf-rollout"),
        *("torch==2.13.0", "transformers>=5.5", "jaxtyping", "gymnasium>=1.2", "mcp>=2.0", *published.split()),
        *("starlette>=1.0", "uvicorn>=0.30", "pytest", "pytest-timeout", "hypothesis"),
    )
    session.run("pytest", "-q", "packages/rlhf-rollout/tests/environments", *session.posargs, env=ENVIRONMENT)
    if trained:
        script = "packages/rlhf-launch/tests/test_agent_examples.py"
        session.run("pytest", "-q", script, "-k", "langchain", *session.posargs, env=ENVIRONMENT)


def closure(package):
    """The package and the siblings it needs."""
    found, todo = [], [package]
    while todo:
        name = todo.pop()
        if name not in found:
            found.append(name)
            needs = " ".join(PACKAGES[name]["dependencies"])
            todo += [other for other in PACKAGES if other in needs]
    return found


def wheels(session, package):
    """`name @ file:...` of freshly built wheels: by name alone a stale or foreign one could be taken."""
    return [wheel(session, ROOT / "packages" / name) for name in closure(package)]


def wheel(session, folder):
    """Build one wheel and refer to it by path."""
    out = Path(session.create_tmp()).resolve() / folder.name
    session.run("uv", "build", "-q", "--wheel", "--clear", "-o", str(out), str(folder), external=True)
    (built,) = out.glob("*.whl")
    name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
    return f"{name} @ {built.as_uri()}"


def constraints(session, package):
    """The locked versions of everything that is not ours."""
    out = Path(session.create_tmp()).resolve() / "constraints.txt"
    session.run(
        *["uv", "export", "-q", "--locked", "--package", package, "--no-emit-workspace", "--no-hashes"],
        *["--no-annotate", "-o", str(out)],
        external=True,
        silent=True,
        env={**os.environ, "UV_NO_PROGRESS": "1"},
    )
    return str(out)
