# SPDX-License-Identifier: Apache-2.0
"""explain() says what runs how often, where a barrier is and why; a bad one is logged once."""

from __future__ import annotations

import gc
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import koila
from limits import there


def barrier_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r" +\d+ .* whole ", line)]


def batch() -> tuple[Tensor, Tensor]:
    return koila.lazy(torch.randn(11, 6), torch.randint(0, 5, (11,)))


def test_one_pass() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    x, y = batch()
    text = koila.explain(F.cross_entropy(model(x), y), full=True)
    assert "1 forward, 1 backward" in text
    assert "2 forwards" not in text
    assert "linear" in text and "[11, 5] float32 samples in dim 0" in text
    assert "cross_entropy_loss       reduce" in text
    assert "add up the results of the chunks" in text


def test_a_call_on_the_whole_batch_is_told_before_it_runs() -> None:
    x, _ = batch()
    text = str(koila.explain(x.sort(0).values.sum()))
    assert re.search(r"whole batch: sort \(.*\).* makes .* whole: ", text)
    assert " made " not in text


def test_labels_are_a_stage_of_their_own() -> None:
    x, y = batch()
    weights = torch.rand(5)
    text = koila.explain(F.cross_entropy(nn.Linear(6, 5)(x), y, weights, ignore_index=2), full=True)
    assert "part 1, in chunks over 11 samples: 1 forward\n" in text
    assert "part 2, in chunks over 11 samples: 1 forward, 1 backward" in text


def test_a_barrier_has_its_reason_and_the_users_line() -> None:
    x, _ = batch()
    model = nn.Linear(6, 5)
    spread = model(x).std(dim=0)
    ranks = torch.sort(model(x), dim=0).values
    text = koila.explain((ranks * spread).mean().sqrt(), full=True)
    assert "two forwards" in text
    assert "2 forwards, 1 backward" in text
    (sort,) = [line for line in barrier_lines(text) if " sort " in line]
    assert "every sample depends on the others" in sort
    assert __file__ in sort


def test_the_cause_of_two_forwards_is_named() -> None:
    x, y = batch()
    loss = F.mse_loss(nn.Linear(6, 1)(x).squeeze(1), y.float()).sqrt()
    first = [line for line in koila.explain(loss).splitlines() if "two forwards" in line]
    assert len(first) == 1
    assert "through sqrt" in first[0] and __file__ in first[0]


def test_every_second_forward_has_its_cause() -> None:
    """In explain() and report(): the call that a later part reads of all chunks. A mean of the
    activations beside it, on which no chunk waits, is none."""
    body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    norm = nn.Sequential(nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

    def contrastive(h: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(h @ h.T, torch.arange(len(h))) + h.abs().mean()

    cases = (
        (lambda h: contrastive(h), {"matmul"}),
        (lambda h: contrastive(h) + 0 * h[:, 0].sort().values.sum(), {"matmul"}),
        (lambda h: norm(h).pow(2).mean() + h.abs().mean(), {"batch_norm"}),
        (lambda h: contrastive(norm(h)), {"batch_norm"}),
        (lambda h: h.std(), {"std"}),
        (lambda h: (h - h.detach().sort(0).values).pow(2).mean(), {"sort"}),
        (lambda h: h.pow(2).mean(), set()),
    )
    for loss_of, wanted in cases:
        x, _ = batch()
        loss = loss_of(body(x))
        before = koila.explain(loss)
        found = re.findall(r"two forwards.*? (?:the result of|through) (\w+) \(", before)
        assert set(found) == wanted, before
        with koila.config(chunks=3):
            loss.backward()
        twice = [one for one in koila.report().main.stages if one.passes.startswith("2 f")]
        told = [
            re.search(rf": its backward needs the result of (\w+) \({__file__}", str(s))
            for s in twice
        ]
        assert {one[1] for one in told if one is not None} == wanted, koila.report()
        assert None not in told


def test_a_graph_that_waits_is_no_second_forward() -> None:
    """What follows the chunks needs their values, but their graphs wait for its gradient."""
    x, _ = batch()
    h = nn.Linear(6, 5)(x).tanh()
    groups = torch.arange(len(x)) % 4
    loss = torch.zeros(4, 5).index_add(0, groups, h).pow(2).sum()
    with koila.config(chunks=3):
        assert "two forwards" not in koila.explain(loss)
        loss.backward()
    passes = {stage.passes for stage in koila.report().main.stages if stage.n_rows is not None}
    assert passes == {"1 forward, 1 backward"}


def test_an_op_without_a_row_is_named() -> None:
    x, _ = batch()
    text = koila.explain(torch.linalg.svdvals(nn.Linear(6, 5)(x)).sum(), full=True)
    (line,) = [line for line in barrier_lines(text) if "svdvals" in line]
    assert "no rule for" in line and __file__ in line


def test_stages_are_numbered_as_they_run() -> None:
    x, y = batch()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    text = koila.explain(F.cross_entropy(model(x), y).sqrt(), full=True)
    numbers = [int(n) for n in re.findall(r"^part (\d+),", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 3


def test_a_call_has_the_users_line() -> None:
    """Not that of torch's own file, in which the module makes the call."""
    x, _ = batch()
    text = koila.explain(nn.Sequential(nn.Linear(6, 8), nn.ReLU())(x), full=True)
    (linear,) = [line for line in text.splitlines() if " linear " in line]
    (relu,) = [line for line in text.splitlines() if " relu " in line]
    assert __file__ in linear and __file__ in relu


def test_bytes_and_chunks_are_told() -> None:
    """What the plan is: with a limit what it allows, with chunks asked for how many."""
    model = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 5))
    x, y = koila.lazy(torch.randn(1000, 6), torch.randint(0, 5, (1000,)))
    loss = F.cross_entropy(model(x), y)
    assert re.search(r"so it runs whole and takes [2-9]\.\d MiB", koila.explain(loss))
    with koila.config(memory_limit=there() + 1800 * 2**10):
        text = koila.explain(loss, full=True)
    assert re.search(r"so it runs in \d+ chunks of \d+ samples and takes .* MiB", text)
    with koila.config(chunks=7):
        assert "so it runs in 7 chunks of 143 samples and takes" in koila.explain(loss)


def test_what_does_not_fit_is_told_and_not_raised() -> None:
    model = nn.Linear(6, 5)
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    with koila.config(memory_limit=100):
        assert "it does not fit: " in koila.explain(loss)
    loss.backward()
    assert model.weight.grad is not None


def test_it_shows_as_it_is() -> None:
    """Without print() too: in a terminal, and in a notebook."""
    x, _ = batch()
    loss = nn.Linear(6, 5)(x).sum()
    text, plan = koila.explain(loss, full=True), koila.plan(loss)
    assert isinstance(text, str)
    assert "<h4>koila.explain</h4>" in text._repr_html_()
    assert str(text) == "\n".join(text.splitlines())
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    assert (pretty(text), pretty(plan)) == (repr(text), repr(plan))
    *shown, hint = repr(text).splitlines()
    assert "\n".join(shown) == str(text)
    assert hint == "(print() leaves this line out; to save it: Path('explain.txt').write_text(...))"


def test_of_what_has_run_the_last_step_is_told() -> None:
    x, _ = batch()
    loss = nn.Linear(6, 5)(x).sum()
    loss.backward()
    first, *rest = koila.explain(loss).splitlines()
    assert first == "nothing is pending: all has run"
    assert "\n".join(rest) == str(koila.report()) and "backward() at " in rest[1]


def test_without_a_lazy_nothing_is_recorded() -> None:
    assert "no lazy tensor" in koila.explain(torch.ones(2))
    assert "nothing is computed yet" in koila.explain(batch()[0])


def test_several_losses() -> None:
    x, _ = batch()
    assert "\n1 call in 1 part; " in koila.explain(x * 2)
    first, second = x.sum(), (x * 2).sum()
    assert "3 calls in 2 parts" in koila.explain(first, second)
    assert "3 calls in 2 parts" in koila.explain([first, second])


def whole_step() -> None:
    x = koila.lazy(torch.randn(4000, 6))
    mixed = torch.sort(x, dim=0).values.cumsum(0).flip(0).cumsum(0)
    nn.Linear(6, 5)(mixed.t().contiguous().t().cumsum(0)).cumsum(0).cumsum(0).mean().backward()


def test_a_bad_barrier_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with koila.config(chunks=3), caplog.at_level(logging.WARNING, logger="koila"):
        whole_step()
        whole_step()
    (record,) = caplog.records
    text = record.getMessage()
    assert "sort needs the whole batch (every sample depends on the others" in text
    assert __file__ in text and "calls run on the whole batch" in text


def test_sorting_a_few_lengths_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Of lazy lengths pack_padded_sequence reads the order, in a pass of their own."""
    lstm = nn.LSTM(3, 4, batch_first=True)
    with koila.config(chunks=3), caplog.at_level(logging.WARNING, logger="koila"):
        x, lengths = koila.lazy(torch.randn(7, 5, 3), torch.tensor([2, 5, 1, 3, 5, 4, 2]))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        lstm(packed)[1][0].square().mean().backward()
    assert not caplog.records
    assert any(program.whole for program in koila.report().programs)


def test_a_good_program_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with koila.config(chunks=3), caplog.at_level(logging.WARNING, logger="koila"):
        x, y = batch()
        F.cross_entropy(nn.Linear(6, 5)(x), y).sqrt().backward()
    assert not caplog.records


def test_an_empty_batch_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It takes no memory, so none is lost; and nothing in it was whole."""
    with koila.config(chunks=3), caplog.at_level(logging.WARNING, logger="koila"):
        nn.Linear(6, 5)(koila.lazy(torch.randn(0, 6))).tanh().square().sum().backward()
    assert not caplog.records
    (program,) = koila.report().programs
    assert program.why == "nothing in it has samples"
    assert program.whole == ()


def test_a_look_at_a_few_rows_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """They are read apart from the model, and are a small part of the batch."""
    with koila.config(chunks=3), caplog.at_level(logging.WARNING, logger="koila"):
        x, y = batch()
        loss = F.cross_entropy(nn.Linear(6, 5)(x), y)
        x[:2].mean().item()
        x[0].tolist()
        assert koila._core.real(loss) is None
        loss.backward()
    assert not caplog.records
    assert [program.n_chunks for program in koila.report().programs] == [2, 1, 3]


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_limit_that_it_names_is_enough(is_refused: bool) -> None:
    """It says what the whole needs, what counts, and a number to set; with that number it runs."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(6)]
    model, x = nn.Sequential(*layers), torch.randn(3000, 128)
    model(x).pow(2).mean().backward()
    wanted = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    model.zero_grad()
    with koila.config(memory_limit=there() + 2**16):
        loss = model(koila.lazy(x)).pow(2).mean()
        if is_refused:
            with pytest.raises(koila.MemoryLimitError) as raised:
                loss.backward()
            text = str(raised.value)
        else:
            text = koila.explain(loss, full=True)
            assert re.search(
                r"^whole needs 14\.\d MiB .*, and 6\d\.\d KiB are left\nit does not fit: at least",
                text,
            )
            assert text.count("the limit is") == 1
    found = re.search(r"='(\d+\.\dMiB)' for at most 16 chunks, or '(\d+\.\dMiB)' for \d+", text)
    assert found is not None, text
    del loss
    for limit in (found[1], found[2]) if is_refused else (found[1],):
        model.zero_grad()
        with koila.config(memory_limit=limit):
            model(koila.lazy(x)).pow(2).mean().backward()
            assert koila.report().n_chunks > 1
        for parameter, want in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, want)


def test_state_that_an_optimizer_will_make_is_told_with_the_limits() -> None:
    """The bytes that are there do not show it, and the limits have to suffice for later steps."""
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    optimizer = torch.optim.Adam(model.parameters())
    coming = f"{2 * sum(p.nbytes for p in model.parameters()) / 2**20:.1f} MiB"
    state = "for the state that the optimizer makes in its first step"
    told = f"{coming} {state}"

    def loss() -> torch.Tensor:
        return model(koila.lazy(torch.randn(2000, 128))).pow(2).mean()

    assert re.search(rf"^least limit that works: .*\), with {told}$", koila.explain(loss()), re.M)
    with (
        koila.config(memory_limit=there() + 2**16),
        pytest.raises(
            koila.MemoryLimitError, match=rf"\n  {coming} of the [\d.]+ MiB are {state}\n"
        ) as raised,
    ):
        loss().backward()
    least = raised.value.least_limit
    assert least is not None
    del raised
    short = "in its first step: this limit is enough only until the optimizer has made it"
    with koila.config(memory_limit=int(least) - 2**19):
        text = koila.explain(loss())
        assert "so it runs in" in text and short in text
    with koila.config(memory_limit=int(least)):
        assert short not in koila.explain(loss())
    loss().backward()
    optimizer.step()
    assert "in its first step" not in koila.explain(loss())


def test_nothing_runs_where_it_does_not_fit() -> None:
    """Though the statistics that are to be written are looked at: what is said is of the step."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 9))
    x, y = koila.lazy(torch.randn(2560, 256), torch.randint(9, (2560,)))
    loss = F.cross_entropy(model(x), y)
    said = []
    for room in (0, 4):
        with koila.config(memory_limit=there() + room * 2**20):
            text = koila.explain(loss)
            assert "needs most: batch_norm of layer '1'" in text
            said.append(re.findall(r"it does not fit: .*: set memory_limit='([\d.]+)MiB'", text))
    assert said[0] == said[1]
    assert repr(loss).startswith("LazyTensor(pending")


def of_mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)
    return nn.Sequential(*layers), torch.randn(2000, 128)


def limits_in(text: str) -> tuple[str, str, int]:
    """Return the limits that a text proposes: the one for few chunks, the least, its chunks."""
    found = re.search(r"='(.*?)' for at most 16 chunks, or '(.*?)' for (\d+)", text)
    assert found is not None, text
    return found[1], found[2], int(found[3])


def test_the_limit_for_at_most_16_chunks_gives_no_more() -> None:
    """In each step, also with an optimizer whose state comes after the first."""
    model, x = of_mlp()
    with (
        koila.config(memory_limit=there() + 2**16),
        pytest.raises(koila.MemoryLimitError) as raised,
    ):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(koila.lazy(x)).pow(2).mean().backward()
    few, least, n_chunks = limits_in(str(raised.value))
    del raised
    with koila.config(memory_limit=few):
        found = []
        for _ in range(3):
            model(koila.lazy(x)).pow(2).mean().backward()
            found.append(koila.report().n_chunks)
            optimizer.step()
            optimizer.zero_grad()
    assert 4 < max(found) <= 16, found
    with koila.config(memory_limit=least):
        model(koila.lazy(x)).pow(2).mean().backward()
    assert 16 < koila.report().n_chunks <= n_chunks


def test_gradients_of_an_earlier_backward_are_told() -> None:
    """They count twice: what a step adds to them is made beside them."""
    model, x = of_mlp()
    gc.collect()  # what tests before left would be freed meanwhile, and leave more

    def loss() -> torch.Tensor:
        return model(koila.lazy(x)).pow(2).mean()

    told = (
        "; these gradients are of an earlier backward(): if that was of an earlier step, zero_grad("
    )
    with (
        koila.config(memory_limit=there() + 2**16),
        pytest.raises(koila.MemoryLimitError) as raised,
    ):
        loss().backward()
    assert told not in str(raised.value)
    _, least, _ = limits_in(str(raised.value))
    del raised
    with koila.config(memory_limit=least):
        assert told not in koila.explain(loss())
        loss().backward()
        with pytest.raises(koila.MemoryLimitError) as raised:
            loss().backward()
        assert told in str(raised.value)
        pending = loss()
        assert told in koila.explain(pending)
        model.zero_grad()
        pending.backward()
        del pending, raised
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).pow(2).mean().backward()
    for want, parameter in zip(wanted, model.parameters(), strict=True):
        torch.testing.assert_close(want, parameter.grad)


def test_parameters_that_plain_calls_read_first() -> None:
    """A slice of a parameter, as of positions: its optimizer's state comes too, of all of it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.randn(3000, 256))
            self.head = nn.Linear(256, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x[:, :, None] * self.positions[: x.shape[1]]).mean(1)

    model, x = Model(), torch.randn(256, 32)
    optimizer = torch.optim.Adam(model.parameters())
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with (
        koila.config(memory_limit=there() + 2**16),
        pytest.raises(koila.MemoryLimitError) as raised,
    ):
        model(koila.lazy(x)).pow(2).mean().backward()
    text = str(raised.value)
    assert f"of which parameters {n_bytes / 2**20:.1f} MiB" in text
    assert f"\n  {2 * n_bytes / 2**20:.1f} MiB of the " in text
    assert "'positions' and its gradient take" in text
    limit = raised.value.least_limit
    assert limit is not None
    del raised
    with koila.config(memory_limit=int(limit)):
        for _ in range(3):
            model(koila.lazy(x)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_loss_that_is_still_held_is_told() -> None:
    model, x = of_mlp()
    held = model(koila.lazy(x)).pow(2).mean()
    told = "that includes other pending calls, whose results are still held: mean (" + __file__
    assert told not in koila.explain(held)
    assert told in koila.explain(model(koila.lazy(x)).pow(2).mean())
    held.backward()
    assert told not in koila.explain(model(koila.lazy(x)).pow(2).mean())


def test_it_says_what_the_step_does() -> None:
    """It looks for optimizers itself, which the step then does not do again at once."""
    model, x = of_mlp()
    optimizer = torch.optim.Adam(model.parameters())
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with koila.config(memory_limit=there() + 5 * n_bytes):
        for _ in range(3):
            loss = model(koila.lazy(x)).pow(2).mean()
            found = re.search(r"^so it runs in (\d+) chunks", koila.explain(loss), re.M)
            loss.backward()
            assert found is not None and int(found[1]) == koila.report().n_chunks > 1
            optimizer.step()
            optimizer.zero_grad()


def test_a_hook_that_asks_for_the_whole_batch_is_named() -> None:
    model, x = of_mlp()
    told = r"two forwards of part \d in chunks: a hook on the result of linear \(.*\) gets the "
    with koila.config(chunks=4):
        scores = model(koila.lazy(x))
        scores.register_hook(lambda gradient: None)
        loss = scores.pow(2).mean()
        assert re.search(told + "gradient of the whole batch", koila.explain(loss))
        loss.backward()
        assert "1 backward: a hook on the result of linear" in str(koila.report())


def test_a_whole_run_takes_what_whole_needs() -> None:
    """Also where chunks were asked for and would take more, and where other calls are pending."""
    model = nn.Linear(8, 2)
    with koila.config(chunks=2):
        x = koila.lazy(torch.randn(64, 8))
        loss = (model(x) @ torch.randn(2, 4096)).sort(0).values.tanh().sum()
        text = koila.explain(loss)
    whole = re.search(r"^whole needs (.*?) more than", text, re.M)
    told = re.search(r"^so it runs whole(.*?) and takes (.*)$", text, re.M)
    assert whole is not None and told is not None and told[2] == whole[1], text
    other = model(koila.lazy(torch.randn(64, 8))).sum()
    text = koila.explain(model(koila.lazy(torch.randn(64, 8))).sum())
    assert re.search(
        r"^whole needs (.*?) more than(?s:.*)^so it runs whole and takes \1$", text, re.M
    )
    del other


def test_a_hook_on_the_loss_is_named() -> None:
    """It is why a mean over the samples needs two forwards, in explain() as in report()."""
    model, x = of_mlp()
    told = r"a hook on the result of mean \(.*\) gets the gradient of the whole batch"
    with koila.config(chunks=4):
        loss = model(koila.lazy(x)).pow(2).mean()
        loss.register_hook(lambda gradient: None)
        assert re.search(f"^two forwards: {told}, so a chunk runs", koila.explain(loss), re.M)
        loss.backward()
        assert re.search(f"2 forwards, 1 backward: {told}", str(koila.report()))
