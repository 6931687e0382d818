"""Ways to call backward that scripts use: the result is plain torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hopshard as hs
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.python.parity.harness import WORLDS, Rank, assert_same, run_sharded
from tests.python.parity.models import GPT, HIDDEN, Mlp


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return Mlp()


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


# --- how many backwards make a step ---------------------------------------------------------------


def train(
    rank: Rank,
    backwards: int,
    zero: Callable[[Rank], None] = lambda rank: rank.optimizer.zero_grad(),
    steps: int = 3,
    order: Callable[[int], Any] = lambda step: None,
) -> None:
    for step in range(steps):
        zero(rank)
        losses = []
        for micro in range(backwards):
            loss = loss_of(rank.model(rank.batch(10 * step + micro), order(step))) / backwards
            loss.backward()
            losses.append(float(loss.detach()))
        rank.step()
        rank.record(losses)


@pytest.mark.parametrize(
    ("backwards", "passes"),
    [(1, 1), (3, 3), (2, 1), (3, 2), (2, 3), (4, 2), (1, 4)],
    ids=lambda n: str(n),
)
def test_any_number_of_backwards(backwards: int, passes: int) -> None:
    assert_same(functools.partial(train, backwards=backwards), mlp(), passes=passes)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("backwards", [1, 2, 3])
def test_no_zero_grad_over_several_steps(backwards: int, passes: int) -> None:
    script = functools.partial(train, backwards=backwards, zero=lambda rank: None, steps=4)
    assert_same(script, mlp(), passes=passes)


def _none_by_hand(rank: Rank) -> None:
    for parameter in rank.model.parameters():
        parameter.grad = None


def _none_in_the_user_module(rank: Rank) -> None:
    rank.module.zero_grad()


@pytest.mark.parametrize(
    "zero",
    [
        _none_by_hand,
        _none_in_the_user_module,
        lambda rank: rank.model.zero_grad(),
        lambda rank: rank.torch_optimizer.zero_grad(),
        lambda rank: rank.optimizer.zero_grad(set_to_none=False),
        lambda rank: rank.model.zero_grad(set_to_none=False),
        lambda rank: rank.torch_optimizer.zero_grad(set_to_none=False),
    ],
    ids=["none", "module", "model", "torch", "zeros", "model_zeros", "torch_zeros"],
)
def test_every_way_to_forget_gradients(zero: Callable[[Rank], None]) -> None:
    assert_same(functools.partial(train, backwards=2, zero=zero), mlp(), passes=2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_forgotten_gradient_is_none_or_zero_as_asked(set_to_none: bool) -> None:
    """Zero still decays the weight and moves it by its momentum, None does not."""
    script = functools.partial(
        train,
        backwards=1,
        zero=lambda rank: rank.optimizer.zero_grad(set_to_none=set_to_none),
        order=lambda step: [0, 1, 2] if step == 0 else [0, 2],
    )
    assert_same(script, mlp())


def test_none_for_one_parameter_between_backwards() -> None:
    def script(rank: Rank) -> None:
        for step in range(2):
            rank.optimizer.zero_grad()
            loss_of(rank.model(rank.batch(step))).backward()
            rank.module.blocks[1].weight.grad = None
            loss_of(rank.model(rank.batch(step + 50))).backward()
            rank.step()
            rank.record()

    assert_same(script, mlp(), passes=2)


# --- several graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, 2])
def test_two_forwards_before_one_backward(passes: int) -> None:
    def script(rank: Rank) -> None:
        for step in range(3):
            rank.optimizer.zero_grad()
            first = rank.model(rank.batch(step))
            second = rank.model(rank.batch(step + 50), [2, 0])
            (loss_of(first) + loss_of(second)).backward()
            rank.step()
            rank.record()

    assert_same(script, mlp(), passes=passes)


@pytest.mark.parametrize("reverse", [False, True])
def test_two_forwards_then_two_backwards(reverse: bool) -> None:
    def script(rank: Rank) -> None:
        for step in range(3):
            rank.optimizer.zero_grad()
            losses = [loss_of(rank.model(rank.batch(step + more))) for more in (0, 50)]
            for loss in reversed(losses) if reverse else losses:
                loss.backward()
            rank.step()
            rank.record()

    assert_same(script, mlp(), passes=2)


@pytest.mark.parametrize("passes", [1, 2])
def test_two_losses_of_one_graph(passes: int) -> None:
    def script(rank: Rank) -> None:
        for step in range(3):
            rank.optimizer.zero_grad()
            output = rank.model(rank.batch(step))
            output[:, 0].square().mean().backward(retain_graph=True)
            loss_of(output).backward()
            rank.step()
            rank.record()

    assert_same(script, mlp(), passes=passes)


class StoresLoss(nn.Module):
    """Each block leaves a loss on itself, as mixtures of experts do."""

    def __init__(self, of_weight: bool) -> None:
        super().__init__()
        self.of_weight = of_weight
        self.up = nn.Linear(HIDDEN, 8)
        self.down = nn.Linear(8, HIDDEN)
        self.auxiliary = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x).tanh()
        self.auxiliary = self.up.weight.square().mean() if self.of_weight else inner.abs().mean()
        return x + self.down(inner)


class WithStoredLosses(Mlp):
    def __init__(self, of_weight: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StoresLoss(of_weight) for _ in range(3))


def _train_with_stored_losses(rank: Rank) -> None:
    for step in range(3):
        rank.optimizer.zero_grad()
        output = rank.model(rank.batch(step))
        stored = sum(block.auxiliary for block in rank.module.blocks)
        (loss_of(output) + 0.5 * stored).backward()
        for block in rank.module.blocks:
            block.auxiliary = torch.zeros(())
        rank.step()
        rank.record()


def test_loss_of_activations_stored_on_the_module() -> None:
    torch.manual_seed(1)
    assert_same(_train_with_stored_losses, WithStoredLosses(of_weight=False))


def test_loss_of_weights_stored_on_the_module_is_right_or_says_why_not() -> None:
    torch.manual_seed(1)
    try:
        assert_same(_train_with_stored_losses, WithStoredLosses(of_weight=True))
    except hs.ShardedError as error:
        if "blocks." not in str(error) or "hopshard.unshard" not in str(error):
            raise


def test_loss_of_weights_outside_the_forward_needs_unshard() -> None:
    def script(rank: Rank) -> None:
        for step in range(2):
            rank.optimizer.zero_grad()
            weight = rank.module.blocks[0].weight
            if rank.is_sharded:
                with hs.unshard(rank.model):
                    loss = loss_of(rank.model(rank.batch(step))) + weight.square().sum()
                    loss.backward()
            else:
                (loss_of(rank.model(rank.batch(step))) + weight.square().sum()).backward()
            rank.step()
            rank.record()

    assert_same(script, mlp())


@pytest.mark.parametrize("passes", [1, 2])
def test_gradient_penalty(passes: int) -> None:
    def script(rank: Rank) -> None:
        for step in range(3):
            rank.optimizer.zero_grad()
            for micro in range(passes):
                rows = rank.batch(step + 50 * micro).requires_grad_()
                output = rank.model(rows)
                (slope,) = torch.autograd.grad(output.sum(), rows, create_graph=True)
                (loss_of(output) + slope.square().mean()).backward()
            rank.step()
            rank.record()

    assert_same(script, mlp(), passes=passes)


@pytest.mark.parametrize("num_blocks", [3, 2])
def test_gradients_of_inputs_alone_reduce_nothing(num_blocks: int) -> None:
    def script(rank: Rank) -> None:
        for step in range(3):
            rank.optimizer.zero_grad()
            rows = rank.batch(step).requires_grad_()
            (slope,) = torch.autograd.grad(rank.model(rows).sum(), rows)
            loss_of(rank.model(rows.detach() + 0.1 * slope)).backward()
            rank.step()
            rank.record(slope)

    torch.manual_seed(1)
    assert_same(script, Mlp(num_blocks))


# --- what units return ----------------------------------------------------------------------------


class Positions(nn.Module):
    """Its output is a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, HIDDEN))

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


class WithPositions(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.position = Positions()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(tokens.shape[1])
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


def _train_on_tokens(rank: Rank) -> None:
    for step in range(3):
        rank.optimizer.zero_grad()
        tokens = (rank.batch(step, 2, 5).abs() * 4).long().clamp(max=12)
        loss_of(rank.model(tokens)).backward()
        rank.step()
        rank.record()


@pytest.mark.parametrize("model", [GPT, WithPositions])
def test_position_embedding_as_its_own_unit(model: type[nn.Module]) -> None:
    torch.manual_seed(1)
    assert_same(_train_on_tokens, model(), unit=["position", "h.*"])


class Outputs(nn.Module):
    """Returns a dict, a list and an object; a unit's outputs may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.blocks[0].register_forward_hook(lambda module, args, out: {"x": [out], "n": None})

    def forward(self, x: Tensor, order: Any = None) -> Tensor:
        return self.blocks[1](self.blocks[0](x)["x"][0].tanh())


def test_outputs_in_containers() -> None:
    torch.manual_seed(1)
    assert_same(functools.partial(train, backwards=1), Outputs())


# --- recomputation --------------------------------------------------------------------------------


class Checkpointed(Mlp):
    use_reentrant = False

    def forward(self, x: Tensor, order: Any = None) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant).tanh()
        return self.last(x)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("model", [Checkpointed, CheckpointedReentrant])
def test_checkpoint_around_blocks(model: type[nn.Module], passes: int) -> None:
    torch.manual_seed(1)
    assert_same(functools.partial(train, backwards=passes), model(), passes=passes)


class NestedCheckpoints(Mlp):
    """Pairs of blocks, and blocks inside them."""

    use_reentrant = False

    def forward(self, x: Tensor, order: Any = None) -> Tensor:
        def one(block: nn.Module, x: Tensor) -> Tensor:
            return x + checkpoint(block, x, use_reentrant=False).tanh()

        def pair(x: Tensor) -> Tensor:
            return one(self.blocks[1], one(self.blocks[0], x))

        x = checkpoint(pair, self.first(x), use_reentrant=self.use_reentrant)
        return self.last(one(self.blocks[2], x))


class NestedInReentrant(NestedCheckpoints):
    use_reentrant = True


@pytest.mark.parametrize("model", [NestedCheckpoints, NestedInReentrant])
@pytest.mark.parametrize("config", [{}, {"reshard_after_forward": False}])
def test_nested_checkpoints(model: type[nn.Module], config: dict[str, Any]) -> None:
    torch.manual_seed(1)
    assert_same(functools.partial(train, backwards=2), model(), passes=2, **config)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_the_model(use_reentrant: bool) -> None:
    def script(rank: Rank) -> None:
        for step in range(3):
            rank.optimizer.zero_grad()
            rows = rank.batch(step).requires_grad_()
            loss_of(checkpoint(rank.model, rows, use_reentrant=use_reentrant)).backward()
            rank.step()
            rank.record()

    assert_same(script, mlp())


# --- other calls between steps --------------------------------------------------------------------


def test_evaluation_between_steps() -> None:
    def script(rank: Rank) -> None:
        for step in range(3):
            rank.optimizer.zero_grad()
            loss_of(rank.model(rank.batch(step))).backward()
            rank.step()
            rank.model.eval()
            with torch.no_grad():
                rank.record(rank.model(rank.batch(99)))
            rank.model.train()

    assert_same(script, mlp())


def test_evaluation_between_backwards() -> None:
    def script(rank: Rank) -> None:
        for step in range(3):
            rank.optimizer.zero_grad()
            loss_of(rank.model(rank.batch(step))).backward()
            with torch.no_grad():
                seen = rank.model(rank.batch(99))
            loss_of(rank.model(rank.batch(step + 50))).backward()
            rank.step()
            rank.record(seen)

    assert_same(script, mlp(), passes=2)


def test_calls_of_submodules() -> None:
    def script(rank: Rank) -> None:
        for step in range(3):
            rank.optimizer.zero_grad()
            x = rank.module.first(rank.batch(step))
            for block in rank.module.blocks:
                x = x + block(x).tanh()
            loss_of(rank.module.last(x)).backward()
            with torch.no_grad():
                seen = rank.module.blocks[1](rank.batch(99))
            rank.step()
            rank.record(seen)

    assert_same(script, mlp())


class Generates(Mlp):
    @torch.no_grad()
    def generate(self, x: Tensor, length: int) -> Tensor:
        for _ in range(length):
            x = torch.cat([x[:, 2:], self(x)], dim=1)
        return x


def test_generate() -> None:
    """A method of the user's module, called through the wrapper, between steps."""

    def script(rank: Rank) -> None:
        for step in range(2):
            rank.optimizer.zero_grad()
            loss_of(rank.model(rank.batch(step))).backward()
            rank.step()
            rank.record(rank.model.generate(rank.batch(99), 4))

    torch.manual_seed(1)
    assert_same(script, Generates())


ORDERS = ([0, 1, 2], [2, 1, 0], [1, 1], [0, 2, 1, 0], [0, 1, 2], [])


@pytest.mark.parametrize("passes", [1, 2])
def test_order_of_units_changes(passes: int) -> None:
    script = functools.partial(
        train, backwards=passes, steps=len(ORDERS), order=lambda step: ORDERS[step]
    )
    assert_same(script, mlp(), passes=passes)


@pytest.mark.parametrize("first_step_too", [False, True])
def test_ranks_skip_units(first_step_too: bool) -> None:
    def script(rank: Rank) -> None:
        for step in range(4):
            skips = (step > 0 or first_step_too) and rank.rank % 2 == step % 2
            rank.optimizer.zero_grad()
            for micro in range(2):
                order = [0, 2] if skips else [0, 1, 2]
                loss_of(rank.model(rank.batch(10 * step + micro), order)).backward()
            rank.step()
            rank.record()

    assert_same(script, mlp(), passes=2)


def test_ranks_in_different_orders_are_told() -> None:
    def script(rank: Rank) -> None:
        for step in range(3):
            order = [1, 0, 2] if rank.rank == 1 and step == 1 else [0, 1, 2]
            rank.optimizer.zero_grad()
            loss_of(rank.model(rank.batch(step), order)).backward()
            rank.step()

    with pytest.raises(hs.Error) as caught:
        run_sharded(script, mlp(), 4, 2, lambda p: torch.optim.SGD(p, lr=0.1), timeout_s=20)
    assert not isinstance(caught.value, hs.TimeoutError)
    assert "blocks." in str(caught.value)


# --- after an exception ---------------------------------------------------------------------------


class OopsError(Exception):
    pass


class Fails(Mlp):
    """Raises where ``fail_in`` says."""

    fail_in = ""

    def forward(self, x: Tensor, order: Any = None) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x + block(x).tanh()
            if number == 1 and self.fail_in == "forward":
                raise OopsError
            if number == 1 and self.fail_in == "backward" and x.requires_grad:
                x.register_hook(_raise)
        return self.last(x)


def _raise(*_: Any) -> None:
    raise OopsError


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("zero_grad_after", [True, False])
@pytest.mark.parametrize("place", ["forward", "evaluation", "optimizer"])
def test_the_iteration_after_an_exception(place: str, passes: int, zero_grad_after: bool) -> None:
    def script(rank: Rank) -> None:
        for step in range(4):
            rank.optimizer.zero_grad()
            if step in (0, 2):
                rank.module.fail_in = "" if place == "optimizer" else "forward"
                with pytest.raises(OopsError):  # noqa: PT012 - one of three statements
                    if place == "optimizer":
                        rank.optimizer.step(_raise)
                    elif place == "evaluation":
                        with torch.no_grad():
                            rank.model(rank.batch(step))
                    else:
                        loss_of(rank.model(rank.batch(step))).backward()
                rank.module.fail_in = ""
                if rank.is_sharded:  # Nothing of the broken pass is held.
                    assert not any(rank.model._engine.is_gathered(unit) for unit in range(4))
                if zero_grad_after:
                    rank.optimizer.zero_grad()
            for micro in range(passes):
                loss_of(rank.model(rank.batch(step + 50 * micro))).backward()
            rank.step()
            rank.record()

    torch.manual_seed(1)
    assert_same(script, Fails(), passes=passes)


@pytest.mark.parametrize("passes", [1, 2])
def test_the_iteration_after_an_exception_in_backward(passes: int) -> None:
    def script(rank: Rank) -> None:
        for step in range(4):
            rank.optimizer.zero_grad()
            if step in (0, 2):
                rank.module.fail_in = "backward"
                with pytest.raises(OopsError):
                    loss_of(rank.model(rank.batch(step))).backward()
                rank.module.fail_in = ""
                rank.optimizer.zero_grad()
            for micro in range(passes):
                loss_of(rank.model(rank.batch(step + 50 * micro))).backward()
            rank.step()
            rank.record()

    torch.manual_seed(1)
    assert_same(script, Fails(), passes=passes)


# --- users' hooks ---------------------------------------------------------------------------------


def test_hooks_of_the_user_fire() -> None:
    def script(rank: Rank) -> None:
        seen: list[float] = []
        weight = rank.module.blocks[1].weight
        weight.register_hook(lambda grad: 3 * grad)
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
        rank.module.blocks[0].register_full_backward_hook(lambda *_: seen.append(-1.0))
        rank.module.blocks[2].register_forward_hook(
            lambda module, *_: seen.append(float(module.weight.detach().norm()))
        )
        rank.module.blocks[2].register_forward_pre_hook(
            lambda module, *_: seen.append(float(module.bias.detach().norm()))
        )
        for step in range(2):
            rank.optimizer.zero_grad()
            loss_of(rank.model(rank.batch(step))).backward()
            rank.step()
            rank.record(list(seen))
        assert len(seen) == 8

    # Plain replicas keep their own gradient, so the norms that the hooks see are equal.
    assert_same(script, mlp())


def test_hooks_from_before_wrapping_fire() -> None:
    base = mlp()
    base.blocks[1].weight.register_hook(lambda grad: 3 * grad)
    assert_same(functools.partial(train, backwards=1), base, worlds=WORLDS[:1])
