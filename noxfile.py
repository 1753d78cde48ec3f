"""What CI runs: `uv run --locked nox`. `nox -s quick` is the subset to run while editing."""

import os
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "typecheck", "api", "tests", "algos_alone", "own_backend"]
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
    """The whole suite, real engines included."""
    session.run("pytest", *session.posargs, env=ENVIRONMENT)


@nox.session
def chaos(session):
    """Runs killed at random moments and resumed until done, compared to the bit with one that was left alone."""
    session.run("python", "packages/rlhf-launch/tests/chaos", *session.posargs, env=ENVIRONMENT)


@nox.session
def faults(session):
    """Workers, Ray's processes and hosts are killed under real runs; prints what each fault costs."""
    session.run("python", "packages/rlhf-launch/tests/faults/measure.py", *session.posargs, env=ENVIRONMENT)


@nox.session
def families(session):
    """Every model type against its own logits, those of vLLM after weight syncs; writes docs/families.md."""
    for script in ("rlhf-core/tests/families/write_table.py", "rlhf-rollout/tests/families/write_engine_table.py"):
        session.run("python", f"packages/{script}", "docs/families.md", *session.posargs, env=ENVIRONMENT)


@nox.session
def vectors(session):
    """Write the frozen vectors of losses and estimators; the tests fail where they are stale."""
    script = "packages/rlhf-algos/tests/vectors/write_vectors.py"
    session.run("python", script, "packages/rlhf-algos/src/rlhf_algos/testing/vectors", env=ENVIRONMENT)


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
