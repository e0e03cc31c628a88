"""Rules of the house that imports cannot say."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "drumline"
TREES = {
    path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text())
    for path in sorted(SOURCE.rglob("*.py"))
}
FEEDBACK = {"advance", "advance_head"}


class Calls(ast.NodeVisitor):
    """The calls in a module, each with the class and function around it."""

    def __init__(self):
        self.scope = []
        self.found = []

    def _enter(self, node):
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _enter

    def visit_Call(self, node):
        self.found.append((".".join(self.scope), node))
        self.generic_visit(node)


def calls(name):
    visitor = Calls()
    visitor.visit(TREES[name])
    return visitor.found


def callee(call):
    """Return a call's dotted target, as far as it is written out."""
    return ast.unparse(call.func)


def control_modules():
    return [name for name in TREES if name.startswith("control/")]


def test_only_the_round_advances_the_scheduler():
    places = {
        f"{name}:{scope}"
        for name in control_modules()
        for scope, call in calls(name)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in FEEDBACK
        and "scheduler" in callee(call)
    }
    assert places == {"control/event_loop.py:EventLoop.round"}


def test_kv_events_are_drained_once_a_round():
    places = [
        f"{name}:{scope}"
        for name in control_modules()
        for scope, call in calls(name)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "drain_kv_events"
    ]
    assert places == ["control/event_loop.py:EventLoop.round"]


@pytest.mark.parametrize("name", [name for name in TREES if name != "core/clock.py"])
def test_time_is_read_by_the_clock_alone(name):
    read = [
        f"line {call.lineno}: {callee(call)}"
        for _, call in calls(name)
        if callee(call)
        in {"time.time", "time.monotonic", "time.monotonic_ns", "time.time_ns", "datetime.now"}
    ]
    assert not read


@pytest.mark.parametrize("name", [name for name in TREES if not name.startswith("cli/")])
def test_only_the_command_line_prints(name):
    printed = [f"line {call.lineno}" for _, call in calls(name) if callee(call) == "print"]
    assert not printed


@pytest.mark.parametrize("name", list(TREES))
def test_nothing_is_global(name):
    names = [f"line {n.lineno}" for n in ast.walk(TREES[name]) if isinstance(n, ast.Global)]
    assert not names


@pytest.mark.parametrize(
    "name", [name for name in TREES if name.startswith(("control/", "scheduler/", "contract/"))]
)
def test_the_control_plane_draws_no_lots(name):
    imported = {
        alias.name
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {node.module for node in ast.walk(TREES[name]) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"random", "secrets", "uuid"}


RUNS_CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load"}
READS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


@pytest.mark.parametrize("name", list(TREES))
def test_nothing_that_is_read_is_run(name):
    ran = [
        f"line {call.lineno}: {callee(call)}"
        for _, call in calls(name)
        if callee(call) in RUNS_CODE
        or any(each.arg in {"shell", "trust_remote_code", "weights_only"} for each in call.keywords)
    ]
    imported = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not ran
    assert not imported & READS_CODE


HOST_READS = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize"}


def test_the_forward_waits_for_the_device_at_known_places_only():
    places = {
        f"{name}:{scope}"
        for name in TREES
        if name.startswith("device/")
        for scope, call in calls(name)
        if isinstance(call.func, ast.Attribute) and call.func.attr in HOST_READS
    }
    assert places == {
        # Host memory that waits for nothing: pinned, or where its tensors are on the host.
        "device/staging.py:all_on_device",
        "device/staging.py:Download.wait",
        # What is on the host by then, or always was, as plain values.
        "device/executor.py:Executor._pooled",
        "device/executor.py:_Pooling.told",
        "device/sampling/logprobs.py:Looked.told",
        "device/sampling/edits.py:Edits.remember",
        "device/sampling/constraints.py:advance",
        # Which rows must be sorted whole, on a CPU.
        "device/sampling/draw.py:_draw_narrowed",
        # Operators wait for their weights to leave the device and to come back.
        "device/memory.py:Memory.write_to",
        "device/memory.py:Memory.read_from",
        "device/memory.py:settle",
        # An operator who looks at a weight waits for it.
        "device/serving_weights.py:ServingWeights.rows",
        # Before a library of kernels is trusted.
        "device/kernels/trial.py:_draws_hold",
        # The pools' memory as bytes, for threads that copy beside a CPU.
        "device/host_pool.py:HostPool.stores",
        "device/host_pool.py:HostPool.loads",
        # Whose thread waits for nothing else.
        "device/stream_copies.py:StreamCopies._end",
    }


def test_values_of_the_device_are_waited_for_at_known_places_only():
    places = {
        f"{name}:{scope}"
        for name in TREES
        if name.startswith("device/")
        for scope, call in calls(name)
        if isinstance(call.func, ast.Attribute)
        and ("Download(" in ast.unparse(call.func) or "download" in ast.unparse(call.func))
        and call.func.attr == "wait"
    }
    assert places == {
        # Where a forward's results become host values, on a thread that waits for them.
        "device/landing.py:Landing.land",
        # Processors read what their requests said.
        "device/sampling/edits.py:Edits.remember",
        # Matchers take the tokens of the forward that drew them.
        "device/sampling/constraints.py:advance",
        # For whoever samples without a forward.
        "device/sampling/sampler.py:Sampled.logprobs",
    }


def test_nothing_is_compiled_while_a_rank_serves():
    """Compilers are run for kernels alone, which `make setup` or a start does."""
    compilers = {
        f"{name}: {callee(call)}"
        for name in TREES
        if name.startswith("device/")
        for _, call in calls(name)
        if callee(call).startswith(
            ("torch.compile", "torch.jit", "torch._dynamo", "subprocess.", "run_leashed")
        )
    }
    assert compilers == {"device/kernels/compiling.py: run_leashed"}


def test_the_control_thread_serves_where_it_reaches_no_device():
    serving = [
        [ast.unparse(item.context_expr) for item in node.items]
        for node in ast.walk(TREES["rank/wiring.py"])
        if isinstance(node, ast.With) and "loop.run(stop)" in ast.unparse(node.body[0])
    ]
    assert serving[-1] == ["NoDevice()"]
