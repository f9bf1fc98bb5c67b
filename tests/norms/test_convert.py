"""convert_norms and norm_report: what is replaced, what is kept of it, and the layouts of
activations and masks.
"""

import pickle
from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import prune

from pn_fairseq.norms import (
    NORMS,
    MaskedBatchNorm,
    build_norm,
    convert_norms,
    fold_norms,
    norm_parameter_names,
    norm_report,
    padding,
)

from ..pairwise import in_pairs
from ..tables import rows
from .converted import (
    CONVERTED_NORMS,
    LENGTHS,
    MASK,
    B,
    ByVariance,
    C,
    FeedForward,
    T,
    converted,
    random_tokens,
    randomized,
    refuses,
    silent,
    warns,
)

#: Of the types, how close two ways to compute the same come.
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0.05, "atol": 0.2},
}


def results(model, x, selected, **mask):
    """Real outputs, gradients and state of one training step."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with padding(**mask):
        y = model(x)[selected]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    (y * weights).sum().backward()
    found = {"y": y, "dx": x.grad[selected]}
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad
    return found | model.state_dict()


def assert_close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        one = found[name].float()
        two = expected[name].float()
        torch.testing.assert_close(one, two, **tolerance, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize(
    "replaced, norm", [(nn.LayerNorm, "layer"), (nn.RMSNorm, "rms"), (nn.BatchNorm1d, "batch")]
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_without_padding_is_what_was_replaced(replaced, norm, dtype):
    model = randomized(FeedForward(replaced)).to(dtype)
    reference = deepcopy(model)
    # torch's has state of the type of the model, and computes in float32
    if replaced is nn.BatchNorm1d:
        for each in (reference.norm, reference.last):
            each.float()
    convert_norms(model, norm)
    x = torch.randn(B * T, C, dtype=dtype)
    everything = torch.ones(B * T, dtype=torch.bool)
    for _ in range(3):
        found = results(model, x, everything, mask=None)
        expected = results(reference, x, everything, mask=None)
        assert_close(found, expected, **TOLERANCE[dtype])
    found = model.eval()(x)
    expected = reference.eval()(x)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


def test_sync_batch_norm_is_replaced_by_a_synchronised_norm():
    group = object()
    model = convert_norms(
        nn.Sequential(nn.SyncBatchNorm(C, momentum=0.3, process_group=group)), "batch"
    )
    assert model[0].sync
    assert model[0].process_group is group
    assert model[0].alpha_fwd == pytest.approx(0.7)
    assert not converted("power").norm.sync  # as in the paper
    assert convert_norms(nn.Sequential(nn.SyncBatchNorm(C, affine=False)), "power")[0].sync
    assert converted().norm.sync


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("norm", ["batch", "batch-reg"])
def test_momentum_is_carried_over(momentum, norm):
    """0 freezes the statistics, 1 keeps those of the last batch."""
    expected = nn.BatchNorm1d(C, momentum=momentum)
    model = convert_norms(deepcopy(expected), norm)
    for step in range(4):
        x = torch.randn(32, C) * (step + 1) + step
        for each in (expected, model):
            each(x).sum().backward()
    # 4 batches of 32 values whose squares are at most 16 times their variance
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(
            getattr(model, name), getattr(expected, name), rtol=5e-5, atol=5e-5
        )
    assert deepcopy(model).alpha_fwd == 1 - momentum


def test_a_momentum_that_cannot_be_carried_over_is_refused():
    make = lambda momentum: nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C, momentum=momentum))  # noqa: E731
    model = make(None)
    with refuses(r"1: its momentum=None averages .* give alpha_fwd=0.9 .*recalibrating\(\)"):
        convert_norms(model, "batch")
    assert isinstance(model[1], nn.BatchNorm1d)
    with refuses(r"1: its momentum=1.5 is not in \[0, 1\]: give alpha_fwd="):
        convert_norms(make(1.5), "batch")
    assert convert_norms(make(None), "batch", alpha_fwd=0.8)[1].alpha_fwd == 0.8
    assert convert_norms(make(None), "rms")[1].replaced == "BatchNorm1d"  # has no statistics


@pytest.mark.parametrize("replaced", [nn.LayerNorm, nn.BatchNorm1d])
def test_momentum_that_is_set_later_is_refused(replaced):
    model = convert_norms(nn.Sequential(replaced(C)), "batch")
    for each in (model, deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(
            AttributeError, match="0: momentum=0.0 would change nothing, .* set alpha_fwd"
        ):
            each[0].momentum = 0.0
        assert not hasattr(each[0], "momentum")


@in_pairs(
    replaced=[nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d],
    norm=["batch", "power", "rms"],
    assign=[False, True],
)
def test_checkpoint_of_the_unconverted_model_loads(replaced, norm, assign):
    state = randomized(FeedForward(replaced)).state_dict()
    model = convert_norms(FeedForward(replaced), norm)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    shared = norm == "batch" and replaced is nn.BatchNorm1d
    for name, tensor in model.state_dict().items():
        given = name in state and (shared or "num_batches" not in name)
        assert tensor.equal(state[name] if given else before[name]), name
    # Its own checkpoints are complete, and one that lacks something is refused.
    own = model.state_dict()
    model.load_state_dict(own)
    if norm == "power":
        del own["norm.running_psi2"]
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(own)


@pytest.mark.parametrize("norm", ["power", "batch", "dyt", "layer", "layer-simple"])
@pytest.mark.parametrize(("saved", "own"), [(0, 4), (4, 0), (4, 2)])
def test_a_checkpoint_with_another_layer_scale_is_refused(norm, saved, own):
    """No tensor of a parameter or statistic shows layer-scale, and outputs would be wrong."""

    def model(groups):
        return converted(norm, layer_scale_groups=groups)

    state = model(saved).state_dict()
    model(saved).load_state_dict(state)
    is_like_unconverted = norm in ("layer", "layer-simple") and saved == 0
    if is_like_unconverted:
        model(own).load_state_dict(state)
        return
    message = f"norm: the checkpoint was trained with layer_scale_groups={saved}, and here it is"
    for strict in (True, False):  # strict=False, as for tied weights, is no way around it
        with pytest.raises(RuntimeError, match=message):
            model(own).load_state_dict(state, strict=strict)


@pytest.mark.parametrize("replaced", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("norm", ["power", "batch", "layer"])
def test_checkpoint_of_the_unconverted_model_loads_in_front_of_layer_scale(replaced, norm):
    model = convert_norms(FeedForward(replaced), norm, layer_scale_groups=4)
    state = randomized(FeedForward(replaced)).state_dict()
    model.load_state_dict(state)
    assert model.norm.weight.equal(state["norm.weight"])


def test_parameters_eps_types_mode_hooks_and_names_are_kept():
    model = nn.Sequential(nn.LayerNorm(C, eps=1e-3), nn.BatchNorm1d(C, eps=1e-2))
    model = model.to(torch.bfloat16).eval()
    weight = model[0].weight.requires_grad_(False)
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    convert_norms(model, "power")
    assert model[0].weight is weight
    assert not model[0].weight.requires_grad
    assert model[0].eps == 1e-3
    assert model[1].eps == 1e-2
    assert not model[0].training
    assert all(b.dtype in (torch.float32, torch.int64) for b in model.buffers())
    model(torch.randn(5, C, dtype=torch.bfloat16))
    assert seen
    norm = nn.LayerNorm(C)
    tied = nn.ModuleList([norm, nn.Linear(C, C), norm])
    convert_norms(tied, "batch")
    assert tied[0] is tied[2]
    assert isinstance(tied[0], MaskedBatchNorm)
    assert isinstance(convert_norms(nn.LayerNorm(C), "batch"), MaskedBatchNorm)


class Biased(ByVariance):
    def __init__(self):
        super().__init__(gain="scale")
        self.bias = nn.Parameter(torch.rand(C))

    def forward(self, x):
        return super().forward(x) + self.bias


class Wide(nn.LayerNorm):
    """As fairseq's Fp32LayerNorm."""

    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class Twice(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def test_other_classes_are_replaced_if_they_compute_the_same():
    model = nn.ModuleDict()
    model["t5"] = ByVariance()
    model["other"] = ByVariance(0.5)
    model["wide"] = Wide(C)
    model["group"] = nn.GroupNorm(2, C)
    model["twice"] = Twice(C)
    model["near"] = ByVariance(0.01)
    model["near in bfloat16"] = ByVariance(0.2).bfloat16()
    model["lazy"] = nn.LazyBatchNorm1d()
    model["biased"] = Biased()
    convert_norms(model, "rms")
    assert [each.name for each in norm_report(model)] == ["t5", "wide", "biased"]
    assert model["t5"].eps == 1e-3
    with refuses("no norm to replace: other computes neither .* lazy does not know its n"):
        convert_norms(model, "rms")
    assert len(norm_report(convert_norms(nn.Sequential(ByVariance().bfloat16()), "rms"))) == 1
    for forward in (lambda x, residual: x, lambda x: x.flatten()):
        model["other"].forward = forward
        with refuses("no norm to replace: other does not accept inputs of shape"):
            convert_norms(model, "rms")


@in_pairs(
    gain=[("weight", 1.0), ("scale", 0.0), ("g", 1.0)],
    norm=["rms", "batch", "power"],
    dtype=[*TOLERANCE, torch.float64],
)
def test_a_gain_that_is_zero_centred_or_has_another_name_stays_so(gain, norm, dtype):
    """One training step against the formula in float64; then state, copies, initialization and
    folding.
    """
    name, offset = gain
    replaced = ByVariance(offset, name).to(dtype)
    state = deepcopy(replaced.state_dict())
    model = convert_norms(nn.Sequential(deepcopy(replaced)), norm)
    x = torch.randn(B, T, C, dtype=dtype)
    wide = x.double()
    parameter = state[name].double().requires_grad_()
    centered = wide - wide[~MASK].mean(0) if norm == "batch" else wide
    squares = centered.square()
    moment = squares[~MASK].mean(0)  # as PN in its psi warm-up
    if norm == "rms":
        moment = squares.mean(-1, keepdim=True)
    expected = (parameter + offset) * centered / (moment + 1e-3).sqrt()
    with padding(MASK):
        y = model(x)
    for each in (y, expected):
        each[~MASK].sum().backward()
    # psi is float32
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-7, torch.bfloat16: 2e-2}[dtype]
    gradient = model.get_parameter(f"0.{name}").grad
    for one, two in ((y[~MASK], expected[~MASK]), (gradient, parameter.grad)):
        largest = 1 + two.abs().max().item()
        torch.testing.assert_close(one.double(), two, rtol=tolerance, atol=tolerance * largest)
    model.load_state_dict({f"0.{name}": value for name, value in state.items()})
    kept = model.state_dict()
    assert kept[f"0.{name}"].equal(state[name])
    assert ("0.weight" in kept) == (name == "weight")
    for each in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each.eval()(x).equal(model.eval()(x))
    if norm != "rms" and dtype != torch.bfloat16:
        chain = nn.Sequential(nn.ReLU(), replaced, nn.Linear(C, C, dtype=dtype))
        convert_norms(chain, norm).eval()
        expected = chain(x)
        assert fold_norms(chain, x) == [("1", "2")]
        torch.testing.assert_close(chain(x), expected, rtol=1e-4, atol=1e-5)
    model[0].reset_parameters()
    assert (model.get_parameter(f"0.{name}") == 1 - offset).all()
    assert (model[0].gain == 1).all()


def test_a_norm_without_eps_is_replaced():
    """As x-transformers'."""
    forward = lambda self, x: nn.functional.normalize(x, dim=-1) * C**0.5 * self.g  # noqa: E731
    norm = type("UnitNorm", (ByVariance,), {"forward": forward})(gain="g")
    x = random_tokens()
    del norm.variance_epsilon
    found = convert_norms(nn.Sequential(norm), "rms")(x)
    torch.testing.assert_close(found, norm(x))


class OwnRMS(nn.Module):
    """A norm whose epsilon is stored as ``name``; None: it is not stored."""

    def __init__(self, name):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))
        self.name = name
        if name is not None:
            setattr(self, name, 1e-5)

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("names", [("gamma", "beta"), ("scale", "shift"), ("weight", "beta")])
def test_a_norm_whose_bias_has_another_name_is_told(names):
    class OwnNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.eps = 1e-5
            for name in reversed(names):
                self.register_parameter(name, nn.Parameter(torch.rand(C)))

        def forward(self, x):
            gain, bias = (getattr(self, name) for name in names)
            return nn.functional.layer_norm(x, (C,), gain, bias, self.eps)

    model = nn.ModuleDict({"own": OwnNorm(), "norm": nn.LayerNorm(C)})
    message = f"computes LayerNorm, but its bias is called {names[1]}: call it bias"
    with warns(f"own {message}"):
        convert_norms(model, "batch")
    assert type(model["own"]) is OwnNorm
    with refuses(f"no norm to replace: .*OwnNorm {message}"):
        convert_norms(OwnNorm(), "batch")


@pytest.mark.parametrize("kind", ["OwnRMS", "OwnRMSNorm"])
@pytest.mark.parametrize("eps_name", ["eps", "variance_epsilon", "epsilon", "e", None])
def test_an_epsilon_is_stored_under_a_known_name_or_told(kind, eps_name):
    own = type(kind, (OwnRMS,), {})(eps_name)
    x = random_tokens() * 1e-3  # beside which epsilon matters
    model = nn.ModuleDict({"plain": nn.LayerNorm(C), "own": own, "slope": nn.PReLU(C)})
    if eps_name in ("e", None):
        told = (
            "own computes LayerNorm or RMSNorm, but its epsilon is unknown: store it as eps or "
            "variance_epsilon or"
        )
        with warns(f"leaves some norms as they are: {told} epsilon. "):
            convert_norms(model, "rms")
        assert model["own"] is own
        with refuses(f"no norm to replace: {told}"):
            convert_norms(nn.Sequential(OrderedDict(own=own)), "rms")
    else:
        with silent():
            convert_norms(model, "rms")
        assert model["own"] is not own
        assert model["own"].eps == 1e-5
        found = model["own"](x)
        torch.testing.assert_close(found, own(x), rtol=1e-5, atol=1e-6)
    assert isinstance(model["slope"], nn.PReLU)


def of_two_inputs(forward):
    """A norm that computes RMSNorm where it is called with x alone."""
    return type("OfTwoInputs", (ByVariance,), {"forward": forward})()


def gated(self, x, gate=None):
    """As the norms of Mamba2."""
    return ByVariance.forward(self, x if gate is None else x * torch.sigmoid(gate))


@pytest.mark.parametrize(
    ("forward", "second"),
    [
        (gated, "gate"),
        (lambda self, x, residual=None, prenorm=False: ByVariance.forward(self, x), "residual"),
        (lambda self, x, *, eps=None: ByVariance.forward(self, x), "eps"),
        # True = token
        (lambda self, x, attention_mask=None: ByVariance.forward(self, x), "attention_mask"),
    ],
)
def test_a_norm_with_a_second_input_is_left(forward, second):
    model = nn.ModuleDict(
        {"plain": ByVariance(), "two": of_two_inputs(forward), "of_mamba": of_two_inputs(gated)}
    )
    kept = {name: module for name, module in model.items() if name != "plain"}
    with warns(
        f"leaves some norms as they are: two takes a second input, {second}, that is",
    ):
        convert_norms(model, "rms")
    assert [each.name for each in norm_report(model)] == ["plain"]
    assert all(model[name] is kept[name] for name in kept)
    with refuses(
        f"no norm to replace: two takes a second input, {second}, that is no padding",
    ):
        convert_norms(model, "rms", only="two")
    with silent():
        convert_norms(nn.ModuleDict({"again": ByVariance(), **kept}), "rms", skip=[*kept])


def test_a_norm_whose_second_input_is_a_mask_is_replaced():
    forward = lambda self, x, padding_mask=None: ByVariance.forward(self, x)  # noqa: E731
    assert len(norm_report(convert_norms(nn.Sequential(of_two_inputs(forward)), "rms"))) == 1


@pytest.mark.parametrize("norm", ["rms", "batch"])
@pytest.mark.parametrize("training", [True, False])
def test_a_second_argument_that_is_no_mask_is_refused(norm, training):
    """Also where no mask is used. T = C: only the type tells a gate from an additive mask."""
    model = convert_norms(nn.Sequential(nn.LayerNorm(C)), norm, layout="BTC").train(training)
    x = torch.randn(B, C, C)
    gate = torch.rand(B, C, C)
    for given in (gate, gate[:, 0], gate > 0.5, [[True] * C] * B, 0.5):
        with refuses(r"0: its second argument must be a padding mask, bool .*skip='0'"):
            model[0](x, given)
    with refuses("does not say whether 1 is padding"):
        model[0](x, torch.ones(B, C, dtype=torch.long))
    mask = torch.arange(C) >= LENGTHS[:, None]
    expected = deepcopy(model)[0](x, mask)
    assert model[0](x, mask[:, None, None]).equal(expected)
    expected = deepcopy(model)[0](x, mask)
    assert model[0](x.flatten(0, 1), mask).view_as(x).equal(expected)


def test_a_weight_that_would_be_lost_is_refused():
    def pruned_bias(norm):
        if hasattr(norm, "bias"):
            return prune.l1_unstructured(norm, "bias", amount=1)
        return prune.identity(norm, "weight")

    def pruned(norm):
        return prune.l1_unstructured(norm, "weight", amount=1)

    def weight_norm(norm):
        return nn.utils.parametrizations.weight_norm(norm, dim=None)

    for compute in (weight_norm, pruned, pruned_bias):
        for norm in (
            nn.LayerNorm(C),
            nn.LayerNorm(C, dtype=torch.bfloat16),
            nn.BatchNorm1d(C),
            ByVariance(),
        ):
            model = nn.ModuleDict({"plain": nn.LayerNorm(C), "computed": compute(norm)})
            with refuses("the (weight|bias) of computed is not a parameter of its own"):
                convert_norms(model, "batch")
            assert len(norm_report(convert_norms(model, "batch", skip="computed"))) == 1
        for norm in (
            nn.LayerNorm((2, C)),
            ByVariance(0.5),
            nn.BatchNorm1d(C, track_running_stats=False),
        ):
            nn.init.uniform_(norm.weight)
            model = nn.ModuleDict({"plain": nn.LayerNorm(C), "stays": compute(norm)})
            assert len(norm_report(convert_norms(model, "batch"))) == 1


@pytest.mark.parametrize("fill", [0.0, 1.0, torch.nan])
def test_what_a_class_computes_does_not_depend_on_its_weight(fill):
    """It may be uninitialized, or on the meta device; zeros hide what it computes."""
    variant = type("Variant", (nn.RMSNorm,), {})(C)  # as eole's; eps is torch's default
    model = nn.ModuleDict(
        {"t5": ByVariance(), "gemma": ByVariance(1.0), "wide": Wide(C), "variant": variant}
    )
    for module in model.values():
        nn.init.constant_(module.weight, fill)
    x = torch.randn(B, C)
    plain = Wide(C, elementwise_affine=False)
    found = convert_norms(plain, "layer")(x)
    torch.testing.assert_close(found, plain(x))
    for each in (deepcopy(model).to("meta"), model):
        found = [norm.name for norm in norm_report(convert_norms(each, "rms"))]
        assert found == ["t5", "gemma", "wide", "variant"]


def test_patterns_choose():
    make = lambda: nn.ModuleDict({"a": FeedForward(), "b": FeedForward()})  # noqa: E731
    names = lambda model: [each.name for each in norm_report(model)]  # noqa: E731
    assert names(convert_norms(make(), "batch", only="a.*")) == ["a.norm", "a.last"]
    found = names(convert_norms(make(), "batch", only=["a.*", "b.last"], skip="*.norm"))
    assert found == ["a.last", "b.last"]
    report = str(norm_report(convert_norms(make(), "batch", mask_from="lengths", skip="b.*"))[0])
    assert report.startswith(
        "a.norm: MaskedBatchNorm for LayerNorm, layout of the mask, mask from padding(...), else "
        "argument lengths of a"
    )
    expected = str(norm_report(convert_norms(make(), "batch", layout="TBC"))[0])
    assert "layout TBC, mask from padding(...)" in expected


#: Arguments beside norm="batch", and the message.
WRONG = r"""
only: c.* | pattern 'c.\*' matches no norm of the model; norms: norm, last
skip: '*' | no norm to replace
norm: bach | unknown norm 'bach', did you mean 'batch'
norm: bn | unknown norm 'bn', did you mean 'batch'
norm: pn | unknown norm 'pn', did you mean 'power'
momentum: 0.1 | unknown norm option 'momentum'; alpha_fwd=0.9 is torch's momentum=0.1 .batch has
alpha_fw: 1 | unknown norm option 'alpha_fw', did you mean 'alpha_fwd'.*has aff
psi_warmup_updates: 1 | unknown norm option 'psi_warmup_updates' .batch has affine
batch_first: true | unknown norm option 'batch_first'
layout: CBT | layout='CBT' must be one of BTC
layout: BCT | layout='BCT' is for batch norms; norm is a LayerNorm over the last dimension
mask_from: mask | mask_from='mask': what its values mean is not known
mask_from: {lengths: length} | 'length' must be a function or one of mask, valid
mask_from: attention_mask | no module that contains a replaced norm has a forward argument
"""


@pytest.mark.parametrize(("arguments", "message"), rows(WRONG))
def test_wrong_arguments(arguments, message):
    with refuses(message):
        converted(**{"norm": "batch", **yaml.safe_load(arguments)})


def test_swapped_arguments_are_named():
    with refuses(r"the model comes first, .* but it is 'batch'"):
        convert_norms("batch", FeedForward())
    state = FeedForward().state_dict()
    with refuses(r"the model comes first, .* but it is of type OrderedDict$"):
        convert_norms(state, "batch")


def test_a_model_that_is_converted_and_one_without_norms_are_told_apart():
    model = converted()
    for options in ({}, {"only": "norm"}):
        with refuses(r"its norms come from this package already \(MaskedBatchNorm\)"):
            convert_norms(model, "power", **options)
    with refuses("no norm to replace: it has neither a LayerNorm or RMSNorm over the last"):
        convert_norms(nn.Sequential(nn.Linear(C, C), nn.GroupNorm(2, C)), "batch")
    with refuses("no norm to replace: only= and skip= leave none"):
        converted(only="norm", skip="norm")


@pytest.mark.parametrize("name", [name for name in NORMS])
def test_every_norm_can_be_put_in(name):
    model = converted(name)
    assert [*model.norm.state_dict()] == [*build_norm(name, C).state_dict()]
    with padding(MASK):
        model(random_tokens()).sum().backward()
    with padding(MASK[:, 1:]):  # evaluation looks at no mask
        model.eval()(random_tokens())


# Wrappers and optimizers.


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_wrapped_model_is_refused(one_rank):
    """RMSNorm has no bias: DistributedDataParallel would not reduce the new one's gradient."""
    make = lambda: nn.Sequential(nn.Linear(C, C), nn.RMSNorm(C))  # noqa: E731
    message = "is wrapped in DistributedDataParallel, which .*: convert before you wrap"
    wrapped = nn.parallel.DistributedDataParallel(make())
    with refuses(f"the model {message}"):
        convert_norms(wrapped, "batch")
    assert isinstance(wrapped.module[1], nn.RMSNorm)
    with refuses(f"inner {message}"):
        convert_norms(nn.ModuleDict({"inner": wrapped}), "batch")
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    with refuses("the model is wrapped in FSDPModule"):
        convert_norms(fully_shard(make(), mesh=mesh), "batch")
    nn.parallel.DistributedDataParallel(convert_norms(make(), "batch"))


def test_names_of_the_parameters_of_norms_before_a_conversion_and_in_a_part_left_out():
    model = nn.Transformer(C, 2, 1, 1, 16, batch_first=True)
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    assert set(norm_parameter_names(model)) == norms
    with warns("future tokens"):
        convert_norms(model, "batch", only="*.layers.*")
    assert set(norm_parameter_names(model)) == norms
    assert norm_parameter_names(nn.Linear(C, C)) == []


def test_names_of_the_parameters_of_norms():
    model = nn.ModuleDict({"norm": nn.LayerNorm(C), "wide": Wide(C), "t5": ByVariance()})
    model["other"] = nn.GroupNorm(2, C)
    model["own"] = build_norm("power", C)
    model["linear"] = nn.Linear(C, C)
    expected = {name for name, _ in model.named_parameters() if name.startswith(("norm", "wide"))}
    convert_norms(model, "batch")
    for each in (model, deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert set(norm_parameter_names(each, nn.LayerNorm)) == expected
        assert norm_parameter_names(each, (Wide, nn.RMSNorm)) == ["wide.weight", "wide.bias"]
        everything = {name for name, _ in each.named_parameters() if not name.startswith("linear")}
        assert set(norm_parameter_names(each)) == everything
        assert len(norm_parameter_names(each)) == len(everything)
    assert norm_parameter_names(convert_norms(nn.LayerNorm(C), "rms")) == ["weight"]


# Padding.


@in_pairs(norm=CONVERTED_NORMS, dtype=list(TOLERANCE), layout=["BTC", "TBC"])
def test_padded_equals_the_concatenation_of_the_sequences(norm, dtype, layout):
    model = convert_norms(randomized(FeedForward()), norm).to(dtype)
    x = torch.randn(B, T, C, dtype=dtype)
    turn = (lambda v: v.transpose(0, 1)) if layout == "TBC" else lambda v: v
    found = results(deepcopy(model), turn(x), turn(~MASK), mask=MASK)
    order = turn(torch.arange(B * T).view(B, T))[turn(~MASK)]
    real = torch.ones(len(order), dtype=torch.bool)
    expected = results(model, x.reshape(-1, C)[order], real, mask=None)
    assert_close(found, expected, **TOLERANCE[dtype])
    together = model.eval()(x)
    for sentence, expected, length in zip(x, together, LENGTHS, strict=True):
        (alone,) = model(sentence[None, :length])
        torch.testing.assert_close(alone, expected[:length], **TOLERANCE[dtype])


class Convolutions(nn.Module):
    """(B, C, T), as in a Conformer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(C, C, 3, padding=1)
        self.norm = nn.BatchNorm1d(C)
        self.outer = nn.Conv1d(C, C, 1)

    def forward(self, x, lengths):
        mask = (torch.arange(x.size(2)) >= lengths[:, None])[:, None]
        h = self.inner(x.masked_fill(mask, 0.0))
        return self.outer(self.norm(h).relu())


FORMS = {
    "mask": MASK,
    "valid": (~MASK).long(),
    "valid, bool": ~MASK,
    "lengths": LENGTHS,
    "additive": torch.zeros(B, T).masked_fill(MASK, -torch.inf),
}
#: As Hugging Face's models make it.
LEAST = torch.finfo(torch.float32).min
FORMS["additive, 4-d"] = torch.zeros(B, 1, 1, T).masked_fill(MASK[:, None, None], LEAST)


@in_pairs(norm=CONVERTED_NORMS, form=list(FORMS), dtype=list(TOLERANCE))
def test_content_of_padding_changes_nothing(norm, form, dtype):
    mask = {form.partition(",")[0]: FORMS[form]}
    x = torch.randn(B, T, C, dtype=dtype)
    filled = x.masked_fill(MASK[..., None], 1e4)
    model = convert_norms(randomized(FeedForward()), norm).to(dtype)
    found = results(deepcopy(model), filled, ~MASK, **mask)
    expected = results(deepcopy(model), x, ~MASK, **mask)
    assert_close(found, expected, rtol=0, atol=0)
    convolutions = convert_norms(Convolutions(), norm, mask_from="lengths").to(dtype)
    y = deepcopy(convolutions)(filled.transpose(1, 2), LENGTHS)
    expected = deepcopy(convolutions)(x.transpose(1, 2), LENGTHS)
    assert y.transpose(1, 2)[~MASK].equal(expected.transpose(1, 2)[~MASK])
    with padding(None):
        unmasked = model(filled)[~MASK]
        assert norm == "power" or not unmasked.equal(model(x)[~MASK])


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("training", [True, False])
def test_zero_padding(norm, training):
    model = converted(norm, zero_padding=True, only="last").train(training)
    with padding(MASK):
        y = model(random_tokens())
    assert (y[MASK] == 0).all()
    assert (y[~MASK] != 0).all()


def test_equal_sizes_ask_for_the_layout_until_one_batch_shows_it():
    square = torch.randn(B, B, C)
    mask = MASK[:, :B]
    model = convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch")
    with (
        padding(mask),
        refuses("0: tokens .* give convert_norms layout='BTC' or layout='TBC'"),
    ):
        model(square)
    with padding(MASK):
        model(torch.randn(T, B, C))
    fixed = convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch", layout="TBC")
    with padding(mask):
        assert model(square).equal(fixed(square))
    with padding(MASK), refuses("do not have the layout TBC but BTC"):
        fixed(random_tokens())


def test_other_shapes():
    x = torch.randn(B, T, 4, C)  # heads
    model = convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch")
    with padding(MASK):
        found = model(x)[~MASK]
    with padding(None):
        expected = deepcopy(model)(x[~MASK].flatten(0, 1))
    torch.testing.assert_close(found.flatten(0, 1), expected)
    flat = convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch", layout="TBC")
    rows = torch.randn(T, B, C)
    with padding(MASK):
        assert flat(rows).flatten(0, 1).equal(flat(rows.flatten(0, 1)))
        assert model(torch.randn(B, C)).shape == (B, C)  # a vector for each sequence
        with refuses("order of its 21 rows"):
            model(rows.flatten(0, 1))
        with refuses("it has 5 rows, neither .* 3 sequences nor their 13 real tokens"):
            model(torch.randn(5, C))
    # Sequences without their padding, as of a PackedSequence or x[mask], have none.
    packed = rows.transpose(0, 1)[~MASK]
    expected = deepcopy(flat)
    with padding(None):
        expected = expected(packed)
    for form, mask in FORMS.items():
        with padding(**{form.partition(",")[0]: mask}):
            for shape in ((13, C), (1, 13, C), (13, 1, C)):
                y = deepcopy(flat)(packed.view(shape))
                assert y.view(13, C).equal(expected)
            sentences = [*packed.split(LENGTHS.tolist())]
            nested = torch.nested.as_nested_tensor(sentences, layout=torch.jagged)
            assert deepcopy(flat)(nested).values().equal(expected)
    with padding(torch.zeros(T, B, dtype=torch.bool)):
        # the order is not known, but no row is padding
        assert model(rows.flatten(0, 1)).shape == (B * T, C)
    image = torch.randn(2, C, 5, 4)
    mask = torch.zeros(2, 5, 4, dtype=torch.bool)
    mask[1, 3:] = True
    model = convert_norms(nn.Sequential(nn.BatchNorm2d(C)), "batch", layout="BCHW")
    with padding(mask):
        y = deepcopy(model)(image)
        filled = image.masked_fill(mask[:, None], 1e4)
        same = deepcopy(model)(filled).movedim(1, -1)
        assert y.movedim(1, -1)[~mask].equal(same[~mask])
        assert y.is_contiguous()
        with refuses("expected an input of layout BCHW"):
            model(torch.randn(2, C, 5))
        with refuses(
            r"images \(2, 6, 4\) = \(B, H, W\) need a mask of this shape; .* \(2, 5, 4\)",
        ):
            model(torch.randn(2, C, 6, 4))
    with padding(mask[:, :1]):  # one row of each image
        row = deepcopy(model)(image[:, :, :1])
    with padding(mask[:, :1, :]), refuses(r"images \(2, 1, 3\) = \(B, H, W\) need a mask"):
        model(image[:, :, :1, :3])
    expected = deepcopy(model)
    with padding(mask[:, 0]):
        same = expected(image[:, :, :1])
    assert row.equal(same)
    with padding(None):
        for given in (image, image.contiguous(memory_format=torch.channels_last)):
            y = deepcopy(model)(given)
            torch.testing.assert_close(y, nn.BatchNorm2d(C)(given), check_stride=True)
    with refuses("0 is for images: give layout='BCHW'"):
        convert_norms(nn.Sequential(nn.BatchNorm2d(C)), "batch")
