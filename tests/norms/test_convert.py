"""convert_norms, padding and norm_report: masked norms in models that pass no mask to their norms."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from pn_fairseq.norms import (
    NORMS,
    MaskedBatchNorm,
    build_norm,
    convert_norms,
    fold_norms,
    norm_report,
    padding,
)
from pn_fairseq.norms.compiled import open_scopes
from pn_fairseq.norms.padding import current_scope

from ..pairwise import in_pairs

B, T, C = 3, 7, 12
LENGTHS = torch.tensor([7, 4, 2])
MASK = torch.arange(T) >= LENGTHS[:, None]

#: Batch statistics, the same about 0, running statistics, and one that mixes both kinds.
SOME = ["batch", "power-v", "power", "batch-renorm"]
DTYPES = [torch.float32, torch.bfloat16]


class FeedForward(nn.Module):
    """A residual network over tokens whose norms get no mask."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.inner = nn.Linear(C, C)
        self.norm = norm(C)
        self.outer = nn.Linear(C, C)
        self.last = norm(C)

    def forward(self, x, lengths=None):
        return self.last(x + self.outer(self.norm(self.inner(x)).relu()))


class Convolutions(nn.Module):
    """(B, C, T), as in a Conformer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(C, C, 3, padding=1)
        self.norm = nn.BatchNorm1d(C)
        self.outer = nn.Conv1d(C, C, 1)

    def forward(self, x, lengths):
        mask = (torch.arange(x.size(2)) >= lengths[:, None])[:, None]
        return self.outer(self.norm(self.inner(x.masked_fill(mask, 0.0))).relu())


def randomized(model):
    """Gains, biases and running statistics away from what they are initially."""
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "bias", None) is not None and module.weight.dim() == 1:
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                nn.init.uniform_(buffer, 0.5, 2)
            else:
                buffer.fill_(3)
    return model


def results(model, x, selected, **mask):
    """Real outputs, gradients and state of one training step."""
    x = x.clone().requires_grad_()
    with padding(**mask):
        y = model(x)[selected]
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return {"y": y, "dx": x.grad[selected]} | {n: p.grad for n, p in model.named_parameters()} | model.state_dict()


def assert_close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name].float(), expected[name].float(), **tolerance, msg=f"{name}: {{}}".format)


# What is replaced and kept.


@pytest.mark.parametrize("replaced, norm", [(nn.LayerNorm, "layer"), (nn.RMSNorm, "rms"), (nn.BatchNorm1d, "batch")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_padding_is_what_was_replaced(replaced, norm, dtype):
    model = randomized(FeedForward(replaced)).to(dtype)
    reference = copy.deepcopy(model)
    if replaced is nn.BatchNorm1d:  # torch's has state of the type of the model, and computes in float32
        for each in (reference.norm, reference.last):
            each.float()
    convert_norms(model, norm)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.2}
    x = torch.randn(B * T, C, dtype=dtype)
    for _ in range(3):
        for each in (model, reference):
            each.zero_grad()
        everything = torch.ones(B * T, dtype=torch.bool)
        assert_close(results(model, x, everything), results(reference, x, everything), **tolerance)
    torch.testing.assert_close(model.eval()(x), reference.eval()(x), **tolerance)


def test_sync_batch_norm_is_replaced_by_a_synchronised_norm():
    group = object()
    model = convert_norms(nn.Sequential(nn.SyncBatchNorm(C, momentum=0.3, process_group=group)), "batch")
    assert model[0].sync and model[0].process_group is group and model[0].alpha_fwd == pytest.approx(0.7)
    assert not convert_norms(FeedForward(), "power").norm.sync  # as in the paper
    assert convert_norms(nn.Sequential(nn.SyncBatchNorm(C, affine=False)), "power")[0].sync
    assert convert_norms(FeedForward(), "batch").norm.sync
    assert convert_norms(nn.BatchNorm1d(C, momentum=1.0), "batch").alpha_fwd == 0.9  # it has to be above 0


@in_pairs(replaced=[nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d], norm=["batch", "power", "rms"], assign=[False, True])
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
        del own["norm.psi_squared" if "norm.psi_squared" in own else next(k for k in own if k.startswith("norm.r"))]
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(own)


def test_parameters_eps_types_mode_hooks_and_names_are_kept():
    model = nn.Sequential(nn.LayerNorm(C, eps=1e-3), nn.BatchNorm1d(C, eps=1e-2)).to(torch.bfloat16).eval()
    weight = model[0].weight.requires_grad_(False)
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    convert_norms(model, "power")
    assert model[0].weight is weight and not model[0].weight.requires_grad
    assert (model[0].eps, model[1].eps) == (1e-3, 1e-2) and not model[0].training
    assert all(b.dtype in (torch.float32, torch.int64) for b in model.buffers())
    model(torch.randn(5, C, dtype=torch.bfloat16))
    assert seen
    tied = nn.ModuleList([norm := nn.LayerNorm(C), nn.Linear(C, C), norm])
    convert_norms(tied, "batch")
    assert tied[0] is tied[2] and isinstance(tied[0], MaskedBatchNorm)
    assert isinstance(convert_norms(nn.LayerNorm(C), "batch"), MaskedBatchNorm)


class ByVariance(nn.Module):
    """As T5's and Llama's norms; with offset 1 as Gemma's, with the gain ``scale`` as torchtune's."""

    def __init__(self, offset=0.0, gain="weight"):
        super().__init__()
        self.variance_epsilon, self.offset, self.gain = 1e-3, offset, gain
        self.register_parameter(gain, nn.Parameter(torch.rand(C)))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (getattr(self, self.gain) + self.offset) * x


class UnitNorm(nn.Module):
    """As x-transformers': no eps, and its gain is called g."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(C))

    def forward(self, x):
        return nn.functional.normalize(x, dim=-1) * C**0.5 * self.g


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


def test_other_classes_are_replaced_if_they_compute_the_same():
    model = {"t5": ByVariance(), "other": ByVariance(0.5), "wide": Wide(C), "group": nn.GroupNorm(2, C)}
    twice = type("Twice", (nn.LayerNorm,), {"forward": lambda self, x: 2 * nn.LayerNorm.forward(self, x)})(C)
    model |= {"twice": twice, "near": ByVariance(0.01), "near in bfloat16": ByVariance(0.2).bfloat16()}
    model |= {"lazy": nn.LazyBatchNorm1d(), "biased": Biased()}
    convert_norms(model := nn.ModuleDict(model), "rms")
    assert [each.name for each in norm_report(model)] == ["t5", "wide", "biased"] and model["t5"].eps == 1e-3
    with pytest.raises(ValueError, match="no norm to replace: other computes neither .* lazy does not know its n"):
        convert_norms(model, "rms")
    assert len(norm_report(convert_norms(nn.Sequential(ByVariance().bfloat16()), "rms"))) == 1
    for forward in (lambda x, residual: x, lambda x: x.flatten()):
        model["other"].forward = forward
        with pytest.raises(ValueError, match="no norm to replace: other does not accept inputs of shape"):
            convert_norms(model, "rms")


@in_pairs(
    gain=[("weight", 1.0), ("scale", 0.0), ("g", 1.0)], norm=["rms", "batch", "power"], dtype=[*DTYPES, torch.float64]
)
def test_a_gain_that_is_zero_centred_or_has_another_name_stays_so(gain, norm, dtype):
    """One training step against the formula in float64; then state, copies, initialization and folding."""
    name, offset = gain
    replaced = ByVariance(offset, name).to(dtype)
    state = copy.deepcopy(replaced.state_dict())
    model = convert_norms(nn.Sequential(copy.deepcopy(replaced)), norm)
    x = torch.randn(B, T, C, dtype=dtype)
    wide, parameter = x.double(), state[name].double().requires_grad_()
    centered = wide - wide[~MASK].mean(0) if norm == "batch" else wide
    squares = centered.square()
    moments = {"rms": squares.mean(-1, keepdim=True), "batch": squares[~MASK].mean(0), "power": torch.ones(())}
    expected = (parameter + offset) * centered / (moments[norm] + 1e-3).sqrt()
    with padding(MASK):
        y = model(x)
    for each in (y, expected):
        each[~MASK].sum().backward()
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-7, torch.bfloat16: 2e-2}[dtype]  # psi is float32
    for one, two in ((y[~MASK], expected[~MASK]), (model.get_parameter(f"0.{name}").grad, parameter.grad)):
        torch.testing.assert_close(one.double(), two, rtol=tolerance, atol=tolerance * (1 + two.abs().max().item()))
    model.load_state_dict({f"0.{name}": value for name, value in state.items()})
    kept = model.state_dict()
    assert kept[f"0.{name}"].equal(state[name]) and ("0.weight" in kept) == (name == "weight")
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each.eval()(x).equal(model.eval()(x))
    if norm != "rms" and dtype != torch.bfloat16:
        chain = convert_norms(nn.Sequential(nn.ReLU(), replaced, nn.Linear(C, C, dtype=dtype)), norm).eval()
        expected = chain(x)
        assert fold_norms(chain, x) == [("1", "2")]
        torch.testing.assert_close(chain(x), expected, rtol=1e-4, atol=1e-5)
    model[0].reset_parameters()
    assert (model.get_parameter(f"0.{name}") == 1 - offset).all() and (model[0].gain == 1).all()


def test_a_norm_without_eps_is_replaced():
    model = convert_norms(nn.Sequential(norm := UnitNorm()), "rms")
    x = torch.randn(B, T, C)
    torch.testing.assert_close(model(x), norm(x))


def test_a_weight_that_would_be_lost_is_refused():
    for compute in (
        lambda norm: nn.utils.parametrizations.weight_norm(norm, dim=None),
        lambda norm: prune.l1_unstructured(norm, "weight", amount=1),
        lambda norm: (
            prune.l1_unstructured(norm, "bias", amount=1) if hasattr(norm, "bias") else prune.identity(norm, "weight")
        ),
    ):
        for norm in (nn.LayerNorm(C), nn.LayerNorm(C, dtype=torch.bfloat16), nn.BatchNorm1d(C), ByVariance()):
            model = nn.ModuleDict({"plain": nn.LayerNorm(C), "computed": compute(norm)})
            with pytest.raises(ValueError, match="the (weight|bias) of computed is not a parameter of its own"):
                convert_norms(model, "batch")
            assert len(norm_report(convert_norms(model, "batch", skip="computed"))) == 1
        for norm in (nn.LayerNorm((2, C)), ByVariance(0.5), nn.BatchNorm1d(C, track_running_stats=False)):
            nn.init.uniform_(norm.weight)
            model = nn.ModuleDict({"plain": nn.LayerNorm(C), "stays": compute(norm)})
            assert len(norm_report(convert_norms(model, "batch"))) == 1


class Variant(nn.RMSNorm):
    """As eole's; eps is torch's default."""


@pytest.mark.parametrize("fill", [0.0, 1.0, torch.nan])
def test_what_a_class_computes_does_not_depend_on_its_weight(fill):
    """It may be uninitialized, or on the meta device; zeros hide what it computes."""
    model = nn.ModuleDict({"t5": ByVariance(), "gemma": ByVariance(1.0), "wide": Wide(C), "variant": Variant(C)})
    for module in model.values():
        nn.init.constant_(module.weight, fill)
    x, plain = torch.randn(B, C), Wide(C, elementwise_affine=False)
    torch.testing.assert_close(convert_norms(plain, "layer")(x), plain(x))
    for each in (copy.deepcopy(model).to("meta"), model):
        assert [norm.name for norm in norm_report(convert_norms(each, "rms"))] == ["t5", "gemma", "wide", "variant"]


def test_patterns_choose():
    make = lambda: nn.ModuleDict({"a": FeedForward(), "b": FeedForward()})  # noqa: E731
    names = lambda model: [each.name for each in norm_report(model)]  # noqa: E731
    assert names(convert_norms(make(), "batch", only="a.*")) == ["a.norm", "a.last"]
    assert names(convert_norms(make(), "batch", only=["a.*", "b.last"], skip="*.norm")) == ["a.last", "b.last"]
    report = str(norm_report(convert_norms(make(), "batch", mask_from="lengths", skip="b.*"))[0])
    assert report.startswith(
        "a.norm: MaskedBatchNorm for LayerNorm, layout of the mask, mask from argument lengths of a,"
    )
    assert "layout TBC, mask from padding(...)" in str(norm_report(convert_norms(make(), "batch", layout="TBC"))[0])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"only": "c.*"}, "pattern 'c.\\*' matches no norm of the model; norms: norm, last"),
        ({"skip": "*"}, "no norm to replace"),
        ({"norm": "bach"}, "unknown norm 'bach', did you mean 'batch'"),
        ({"alpha": 1}, "norm 'batch' has no option 'alpha'; known: affine, alpha_fwd"),
        ({"psi_warmup_updates": 1}, "norm 'batch' has no option 'psi_warmup_updates'"),
        ({"batch_first": True}, "no option 'batch_first'"),
        ({"layout": "CBT"}, "layout='CBT' must be one of BTC"),
        ({"layout": "BCT"}, "layout='BCT' is for batch norms; norm is a LayerNorm over the last dimension"),
        ({"mask_from": "mask"}, "mask_from='mask': what its values mean is not known"),
        ({"mask_from": {"lengths": "length"}}, "'length' must be a function or one of mask, valid"),
        ({"mask_from": "attention_mask"}, "no module that contains a replaced norm has a forward argument"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        convert_norms(FeedForward(), **{"norm": "batch", **arguments})


# Masks.


@in_pairs(norm=SOME, dtype=DTYPES, layout=["BTC", "TBC"])
def test_padded_equals_the_concatenation_of_the_sequences(norm, dtype, layout):
    model = convert_norms(randomized(FeedForward()), norm).to(dtype)
    x = torch.randn(B, T, C, dtype=dtype)
    turn = (lambda v: v.transpose(0, 1)) if layout == "TBC" else lambda v: v
    found = results(copy.deepcopy(model), turn(x), turn(~MASK), mask=MASK)
    order = turn(torch.arange(B * T).view(B, T))[turn(~MASK)]
    real = torch.ones(len(order), dtype=torch.bool)
    expected = results(model, x.reshape(-1, C)[order], real, mask=None)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.2}
    assert_close(found, expected, **tolerance)
    model.eval()
    together = model(x)
    for index, length in enumerate(LENGTHS):
        torch.testing.assert_close(model(x[[index], :length]), together[[index], :length], **tolerance)


FORMS = {
    "mask": MASK,
    "valid": (~MASK).long(),
    "valid, bool": ~MASK,
    "lengths": LENGTHS,
    "additive": torch.zeros(B, T).masked_fill(MASK, -torch.inf),
    "additive, 4-d": torch.zeros(B, 1, 1, T).masked_fill(MASK[:, None, None], torch.finfo(torch.float32).min),
}


@in_pairs(norm=SOME, form=list(FORMS), dtype=DTYPES)
def test_content_of_padding_changes_nothing(norm, form, dtype):
    mask = {form.partition(",")[0]: FORMS[form]}
    x = torch.randn(B, T, C, dtype=dtype)
    filled = x.masked_fill(MASK[..., None], 1e4)
    model = convert_norms(randomized(FeedForward()), norm).to(dtype)
    found, expected = (results(copy.deepcopy(model), each, ~MASK, **mask) for each in (filled, x))
    assert_close(found, expected, rtol=0, atol=0)
    convolutions = convert_norms(Convolutions(), norm, mask_from="lengths").to(dtype)
    y, expected = (copy.deepcopy(convolutions)(each.transpose(1, 2), LENGTHS) for each in (filled, x))
    assert y.transpose(1, 2)[~MASK].equal(expected.transpose(1, 2)[~MASK])
    unmasked = copy.deepcopy(model)
    with padding(None):
        assert not unmasked(filled)[~MASK].equal(unmasked(x)[~MASK]) or norm == "power"


class Sub(nn.Module):
    """A module whose forward has a mask, also one of another length."""

    def __init__(self):
        super().__init__()
        self.norm, self.pool = nn.LayerNorm(C), nn.LayerNorm(C)

    def forward(self, x, padding_mask=None, *, lengths=None):
        return self.pool(self.norm(x)[:, ::2])


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.LayerNorm(C), Sub()

    def forward(self, x, attention_mask, halved=None, fail=False):
        x = self.first(x)
        if fail:
            raise KeyError("stop")
        return self.inner(x, halved)


def test_the_innermost_module_with_the_argument_decides():
    model = convert_norms(Outer(), "batch", mask_from=["padding_mask", "attention_mask"], skip="*pool")
    assert norm_report(model)[1].masks == ("argument padding_mask of inner", "argument attention_mask of the model")
    assert "argument padding_mask of inner (no mask if None), else argument attention_mask" in str(
        norm_report(model)[1]
    )
    x = torch.randn(B, T, C)
    filled = x.masked_fill(MASK[..., None], 1e4)
    valid = (~MASK).int()
    for given in ((valid, MASK), (valid, torch.zeros(B, T).masked_fill(MASK, -torch.inf))):
        y, expected = (copy.deepcopy(model)(each, *given) for each in (filled, x))
        assert y[~MASK[:, ::2]].equal(expected[~MASK[:, ::2]])
    with pytest.raises(KeyError):
        model(x, valid, fail=True)  # leaves no scope behind
    with pytest.warns(UserWarning, match="first takes statistics .* no padding mask has reached it: padding"):
        copy.deepcopy(model).first(x)


def test_an_argument_that_is_none_hides_the_masks_of_modules_around():
    """With the warning, as the inner module may have other tokens; a block holds there."""
    x = torch.randn(B, T, C)
    filled, real = x.masked_fill(MASK[..., None], 1e4), ~MASK[:, ::2]
    for form, mask, full in (
        ("valid", (~MASK).int(), torch.ones_like(MASK, dtype=torch.int)),
        ("lengths", LENGTHS, torch.full_like(LENGTHS, T)),
    ):
        arguments = {"padding_mask": "mask", "attention_mask": form}
        model = convert_norms(Outer(), "batch", mask_from=arguments, skip="*pool")
        with pytest.warns(UserWarning, match=r"inner.norm .* reached it \(argument padding_mask of inner is None\)"):
            hidden = copy.deepcopy(model)(filled, mask)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x, full)  # Hugging Face's models hand None on if there is no padding
            with padding(MASK):
                y, expected = (copy.deepcopy(model)(each, mask) for each in (filled, x))
        assert y[real].equal(expected[real]) and not y[real].equal(hidden[real])
    model = convert_norms(Outer(), "batch", mask_from=arguments, only="inner.norm")
    with pytest.warns(UserWarning, match="inner.norm"):
        model(x, full + 2)  # of other sequences


class Attending(nn.Module):
    """A layer of a decoder without a mask of its own tokens."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, x, encoder_out=None, src_lengths=None):
        return self.norm(x)


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.LayerNorm(C), Attending()

    def forward(self, x, y, src_lengths=None, lengths=None, target_lengths=None, attends=True):
        memory = self.encoder(x)
        kinds = {"dict": {"memory": memory}, "speaker": memory[:, 0], "TBC": memory.transpose(0, 1), True: memory}
        attended = kinds.get(attends)
        return self.decoder(y, attended, src_lengths)


@pytest.mark.parametrize(
    ("argument", "source_length", "attends", "used"),
    [
        ("src_lengths", T, True, False),
        ("src_lengths", T, False, True),
        ("src_lengths", T, "speaker", True),
        ("lengths", T, True, False),
        ("lengths", T, "dict", False),
        ("lengths", T, "TBC", False),
        ("lengths", T + 1, True, True),
        ("target_lengths", T, True, True),
    ],
)
def test_a_mask_of_the_source_is_none_for_what_attends_to_it(argument, source_length, attends, used):
    """Where source and target have equal lengths, no shape tells their masks apart."""
    model = convert_norms(EncoderDecoder(), "batch", mask_from={argument: "lengths"}, layout="BTC", only="decoder*")
    source, target = torch.randn(B, source_length, C), torch.randn(B, T, C)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(source, target, attends=attends, **{argument: LENGTHS}).sum().backward()
    assert ["no padding mask has reached it: " in str(each.message) for each in caught] == [True] * (not used)
    assert norm_report(model)[-1].masks == (f"argument {argument} of the model",)  # encoder_out may be None
    model.eval()
    tokens = target[~MASK] if used else target.flatten(0, 1)
    torch.testing.assert_close(model.decoder.norm.running_mean, 0.1 * tokens.mean(0))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x, memory: self.norm(x),
        lambda self, x, encoder_outputs: self.norm(x),
        lambda self, x, enc_output: self.norm(x),
    ],
)
def test_names_of_what_a_module_attends_to(forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = type("Decoder", (Attending,), {"forward": forward})()

        def forward(self, x, src_lengths):
            return self.decoder(x, x)

    model = convert_norms(Model(), "batch", mask_from="src_lengths", layout="BTC")
    assert norm_report(model)[0].masks == ()
    x = torch.randn(B, T, C)
    with pytest.warns(UserWarning, match="no padding mask has reached it"):
        model(x, LENGTHS).sum().backward()
    torch.testing.assert_close(model.decoder.norm.running_mean, 0.1 * x.mean((0, 1)))


def test_the_decoder_of_torchs_transformer_does_not_take_the_mask_of_the_source():
    make = lambda: nn.Transformer(C, 2, 1, 1, 8, 0.0, batch_first=True)  # noqa: E731
    source, target = torch.randn(2, B, T, C)
    masks = {"src_key_padding_mask": MASK, "tgt_key_padding_mask": MASK.flip(0)}
    model = convert_norms(make(), "batch", mask_from="src_key_padding_mask", layout="BTC")
    assert [bool(each.masks) for each in norm_report(model)] == [each.name[:2] == "en" for each in norm_report(model)]
    with pytest.warns(UserWarning, match="decoder.layers.0.norm1 .* no padding mask has reached it: "):
        model(source, target, src_key_padding_mask=MASK)
    model, real = convert_norms(make(), "batch", mask_from=list(masks), layout="BTC"), ~MASK.flip(0)
    filled = target.masked_fill(~real[..., None], 1e4)
    y, expected = (copy.deepcopy(model)(source, each, **masks)[real] for each in (filled, target))
    assert y.equal(expected)


def test_functions_of_an_argument():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(C)

        def forward(self, x, ids):
            return self.norm(x)

    ids = torch.where(MASK, 1, 5)
    x = torch.randn(B, T, C)
    for form, mask in ((lambda ids: ids == 1, ids), ("valid", FORMS["additive, 4-d"])):
        model = convert_norms(Tokens(), "batch", mask_from={"ids": form})
        y, expected = (copy.deepcopy(model)(each, ids=mask) for each in (x.masked_fill(MASK[..., None], 1e4), x))
        assert y[~MASK].equal(expected[~MASK])


def test_a_mask_of_another_length_names_the_module():
    model = convert_norms(Outer(), "batch", mask_from=["padding_mask", "attention_mask"])
    x = torch.randn(B, T, C)
    with pytest.raises(ValueError, match=r"inner.pool: .* 3 sequences of length 4, .* is for 3 of length 7; .*skip="):
        model(x, (~MASK).int(), MASK)
    for mask in ({"mask": MASK}, {"lengths": LENGTHS}):
        with padding(**mask), pytest.raises(ValueError, match="inner.pool.* length 4, and .* 3 of length 7"):
            convert_norms(Outer(), "batch")(x, None)
    model = convert_norms(Outer(), "batch", skip="inner.norm")
    with padding(MASK):
        with pytest.raises(ValueError, match="first: its tokens are 4 sequences of length 7, and .* is for 3"):
            model.first(torch.randn(4, T, C))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"mask": (~MASK).long()}, "a mask of torch.int64 does not say whether 1 is padding"),
        ({"valid": MASK.float()}, "may be additive; give bool or int"),
        ({"additive": MASK}, "additive mask .* is not torch.bool"),
        ({"lengths": LENGTHS.float()}, "lengths are \\(B,\\) whole numbers"),
        ({"mask": MASK, "lengths": LENGTHS}, "padding\\(mask=, lengths=\\): give one of them"),
        ({"mask": [[True]]}, "expected a tensor, got list"),
    ],
)
def test_wrong_masks(arguments, message):
    with pytest.raises(ValueError, match=message):
        padding(**arguments)


def test_wrong_additive_mask():
    with (
        padding(additive=torch.ones(B, T)),
        pytest.raises(RuntimeError, match="holds 0 at tokens and at most -10000 at padding"),
    ):
        convert_norms(nn.LayerNorm(C), "batch")(torch.randn(B, T, C))


def test_equal_sizes_ask_for_the_layout_until_one_batch_shows_it():
    square, mask = torch.randn(B, B, C), MASK[:, :B]
    model = convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch")
    with padding(mask), pytest.raises(ValueError, match="0: tokens .* give convert_norms layout='BTC' or layout='TBC'"):
        model(square)
    with padding(MASK):
        model(torch.randn(T, B, C))
    fixed = convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch", layout="TBC")
    with padding(mask):
        assert model(square).equal(fixed(square))
    with padding(MASK), pytest.raises(ValueError, match="do not have the layout TBC but BTC"):
        fixed(torch.randn(B, T, C))


def test_other_shapes():
    x = torch.randn(B, T, 4, C)  # heads
    model = convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch")
    with padding(MASK):
        found = model(x)[~MASK]
    with padding(None):
        torch.testing.assert_close(found.flatten(0, 1), copy.deepcopy(model)(x[~MASK].flatten(0, 1)))
    flat = convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch", layout="TBC")
    rows = torch.randn(T, B, C)
    with padding(MASK):
        assert flat(rows).flatten(0, 1).equal(flat(rows.flatten(0, 1)))
        assert model(torch.randn(B, C)).shape == (B, C)  # a vector for each sequence
        with pytest.raises(ValueError, match="order of its 21 rows"):
            model(rows.flatten(0, 1))
        with pytest.raises(ValueError, match="it has 5 rows, neither .* 3 sequences nor their 13 real tokens"):
            model(torch.randn(5, C))
    # Sequences without their padding, as of a PackedSequence or x[mask], have none.
    packed, expected = rows.transpose(0, 1)[~MASK], copy.deepcopy(flat)
    with padding(None):
        expected = expected(packed)
    for form, mask in FORMS.items():
        with padding(**{form.partition(",")[0]: mask}):
            for shape in ((13, C), (1, 13, C), (13, 1, C)):
                assert copy.deepcopy(flat)(packed.view(shape)).view(13, C).equal(expected)
            nested = torch.nested.as_nested_tensor([*packed.split(LENGTHS.tolist())], layout=torch.jagged)
            assert copy.deepcopy(flat)(nested).values().equal(expected)
    with padding(torch.zeros(T, B, dtype=torch.bool)):
        assert model(rows.flatten(0, 1)).shape == (B * T, C)  # the order is not known, but no row is padding
    image = torch.randn(2, C, 5, 4)
    mask = torch.zeros(2, 5, 4, dtype=torch.bool)
    mask[1, 3:] = True
    model = convert_norms(nn.Sequential(nn.BatchNorm2d(C)), "batch", layout="BCHW")
    with padding(mask):
        y, same = (copy.deepcopy(model)(v) for v in (image, image.masked_fill(mask[:, None], 1e4)))
        assert y.movedim(1, -1)[~mask].equal(same.movedim(1, -1)[~mask]) and y.is_contiguous()
        with pytest.raises(ValueError, match="expected an input of layout BCHW"):
            model(torch.randn(2, C, 5))
        with pytest.raises(
            ValueError, match=r"images \(2, 6, 4\) = \(B, H, W\) need a mask of this shape; .* \(2, 5, 4\)"
        ):
            model(torch.randn(2, C, 6, 4))
    with padding(None):
        for given in (image, image.contiguous(memory_format=torch.channels_last)):
            y = copy.deepcopy(model)(given)
            torch.testing.assert_close(y, nn.BatchNorm2d(C)(given), check_stride=True)
    with pytest.raises(ValueError, match="0 is for images: give layout='BCHW'"):
        convert_norms(nn.Sequential(nn.BatchNorm2d(C)), "batch")


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("training", [True, False])
def test_zero_padding(norm, training):
    model = convert_norms(FeedForward(), norm, zero_padding=True, only="last").train(training)
    with padding(MASK):
        y = model(torch.randn(B, T, C))
    assert (y[MASK] == 0).all() and (y[~MASK] != 0).all()


def test_one_warning_for_a_model_without_any_mask():
    model = convert_norms(FeedForward(), "batch", zero_padding=True)
    x = torch.randn(B, T, C)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with padding(None):
            model(x)
        with padding(MASK):
            model(x)
        model(x.flatten(0, 1))
        model.eval()(x)
        convert_norms(FeedForward(), "layer", zero_padding=True)(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.train()(x)
        model(x)
    assert len(caught) == 1 and str(caught[0].message).startswith("norm takes statistics over the tokens of a batch")


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, x, attention_mask):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_hooks_of_a_model_serve_copies_of_its_norms_and_no_other_model(copied):
    """As in depth up-scaling, and in PEFT's modules_to_save."""
    model = convert_norms(Stack(), "batch", mask_from="attention_mask")
    model.layers.append(copied(model.layers[1]))
    model.layers[0].norm = nn.Sequential(copied(model.layers[0].norm))
    model = copied(model)
    assert [each.name for each in norm_report(model)][::5] == ["layers.0.norm.0", "layers.2.last"]
    assert all(each.masks == ("argument attention_mask of the model",) for each in norm_report(model))
    x, valid = torch.randn(B, T, C), (~MASK).long()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, expected = (copied(model)(each, valid)[~MASK] for each in (x, x.masked_fill(MASK[..., None], 1e4)))
    assert y.equal(expected)
    model.layers[0] = convert_norms(FeedForward(), "batch")
    with pytest.warns(UserWarning, match="norm takes statistics"):
        model(x, valid)


# Recomputation.


class Known(nn.Module):
    """Its class is given the name of a package whose masks are known."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C)), nn.LayerNorm(C)

    def forward(self, x, mask=None, lengths=None):
        return self.norm(self.inner(x))


@pytest.mark.parametrize("package", ["joeynmt.encoders", "of_a_user"])
def test_masks_of_known_names_are_found_without_being_named(package):
    x, expected = torch.randn(B, T, C), convert_norms(Known(), "batch", mask_from="lengths")
    known = type("Known", (Known,), {"__module__": package})
    model = convert_norms(known(), "batch")
    model.load_state_dict(expected.state_dict())
    given = {"mask": ~MASK} if package.startswith("joeynmt") else {"lengths": LENGTHS}
    for block in (MASK, None):  # counts before arguments that nobody named
        with padding(block):
            explicit = copy.deepcopy(model)(x, **given)
        with padding(block):
            assert explicit.equal(copy.deepcopy(model)(x))
    pickle.loads(pickle.dumps(convert_norms(Known(), "batch")))
    assert model(x, **given).equal(expected(x, lengths=LENGTHS))
    assert "mask from padding(...), else argument" in str(norm_report(model)[0])
    with pytest.warns(UserWarning, match="inner.1 takes statistics"):
        convert_norms(known(), "batch", mask_from=())(x, **given)


class Checkpointed(nn.Module):
    def __init__(self, inner, hands_on=True, **options):
        super().__init__()
        self.inner, self.hands_on, self.options = inner, hands_on, options

    def forward(self, x, lengths=None):
        given = (lengths,) if self.hands_on and lengths is not None else ()
        return checkpoint(self.inner if self.hands_on else self.inner.forward, x, *given, **self.options)


#: Way of a mask to a recomputation -> the options of ``checkpoint``.
MASK_GIVEN_BY = {
    "argument, reentrant": {"use_reentrant": True},
    "argument": {"use_reentrant": False},
    "block": {"use_reentrant": False, "context_fn": padding.context_fn},
    "argument of a module around": {"use_reentrant": False, "context_fn": padding.context_fn},
}


@in_pairs(norm=SOME, way=list(MASK_GIVEN_BY), together=[True, False])
def test_recomputation_has_the_mask_of_its_forward(norm, way, together):
    """Also where several forwards run before one backward, and one of them had no padding."""
    plain = convert_norms(randomized(FeedForward()), norm, mask_from="lengths")
    around = way == "argument of a module around"
    again = Checkpointed(randomized(FeedForward()), hands_on=not around, **MASK_GIVEN_BY[way])
    again = convert_norms(again, norm, mask_from="lengths")
    again.inner.load_state_dict(plain.state_dict())
    x = torch.randn(B, T, C)
    gradients = {}
    for model in (plain, again):
        inputs, losses = [], []
        for lengths in (LENGTHS, LENGTHS.flip(0), torch.full_like(LENGTHS, T)):
            inputs.append(x.clone().requires_grad_())
            given, block = ((), lengths) if way == "block" else ((lengths,), None)
            with padding(lengths=block):
                losses.append(model(inputs[-1], *given)[0].square().sum())
            if not together:
                losses.pop().backward()
        if together:
            sum(losses).backward()
        gradients[model] = [each.grad for each in (*inputs, *model.parameters())]
    assert current_scope() is None
    for found, expected in zip(gradients[again], gradients[plain], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_without_its_mask_is_an_error(reentrant):
    """Also if the block lasts until the backward, since another forward may have run in another block."""
    model = convert_norms(FeedForward(), "batch")
    again, x = Checkpointed(model, use_reentrant=reentrant), torch.randn(B, T, C, requires_grad=True)
    with padding(None):
        again(x).sum().backward()
    model(x.flatten(0, 1)).sum().backward()
    with padding(MASK):
        y = again(x)
        with pytest.raises(RuntimeError, match="norm: this forward is being recomputed .* give checkpoint context_fn="):
            y.sum().backward()
    again = convert_norms(
        Checkpointed(FeedForward(), hands_on=False, use_reentrant=reentrant), "batch", mask_from="lengths"
    )
    y = again(x, LENGTHS)
    with pytest.raises(RuntimeError, match="norm: this forward is being recomputed .* pass the mask as an argument"):
        y.sum().backward()
    again.hands_on = True  # the recomputation sees, as its forward, that the argument is None
    with pytest.warns(UserWarning, match=r"\(argument lengths of inner is None\)"):
        again(x).sum().backward()


def test_training_cannot_be_exported():
    with pytest.raises(RuntimeError, match=r"torch.export .* call eval\(\) first"):
        torch.export.export(convert_norms(FeedForward(), "power"), (torch.randn(B, T, C),), strict=False)
    assert not open_scopes  # a model that is compiled next would run in them


@pytest.mark.parametrize("name", [name for name in NORMS])
def test_every_norm_can_be_put_in(name):
    model = convert_norms(FeedForward(), name)
    assert [*model.norm.state_dict()] == [*build_norm(name, C).state_dict()]
    with padding(MASK):
        model(torch.randn(B, T, C)).sum().backward()
    with padding(MASK[:, 1:]):  # evaluation looks at no mask
        model.eval()(torch.randn(B, T, C))


class PreNorm(nn.Module):
    """A norm that two linear maps take, one after a grouped convolution, one before a padded one, and a post-norm."""

    def __init__(self):
        super().__init__()
        self.first, self.q, self.k = nn.LayerNorm(C), nn.Linear(C, C, bias=False), nn.Linear(C, C)
        self.convolution, self.middle = nn.Conv1d(C, C, 3, padding=1, groups=C, bias=False), nn.BatchNorm1d(C)
        self.edge, self.padded, self.post = nn.BatchNorm1d(C), nn.Conv1d(C, C, 3, padding=1), nn.LayerNorm(C)

    def forward(self, x):
        h = self.first(x)
        x = (x + self.q(h) * self.k(h)).transpose(1, 2)
        x = self.middle(self.convolution(x)).relu()
        x = self.padded(self.edge(x)).transpose(1, 2)
        return self.post(x + 1) * 2


@pytest.mark.parametrize("norm", ["batch", "power"])
def test_folding(norm):
    model = convert_norms(randomized(PreNorm()), norm)
    x = torch.randn(B, T, C)
    for _ in range(3):
        with padding(MASK):
            model(x).square().sum().backward()
    with pytest.raises(ValueError, match="call eval"):
        fold_norms(model, x)
    expected = model.eval()(x)
    # Zeros that a convolution pads with are not normalized, and the post-norm is followed by no map.
    assert fold_norms(model, x) == [("first", "q, k"), ("middle", "convolution")]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert [each.name for each in norm_report(model)] == ["edge", "post"]
    assert fold_norms(convert_norms(PreNorm(), norm, zero_padding=True).eval(), x) == []
    for chain, example, folded in (
        (InADict(nn.LayerNorm(C), nn.Linear(C, C)), x, ("0", "1")),
        (nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C)), x, ("1", "0")),
        (nn.Sequential(nn.BatchNorm1d(C), nn.Conv1d(C, C, 2)), x.transpose(1, 2), ("0", "1")),
    ):
        assert fold_norms(randomized(convert_norms(chain, norm)).eval(), example) == [folded]


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("only", ["*", "*.norm2"])
def test_folding_torchs_encoder(norm_first, only):
    """Its layers read eps of their norms, and have a fast path that computes LayerNorm."""
    layer = nn.TransformerEncoderLayer(C, 2, 32, batch_first=True, norm_first=norm_first)
    model = convert_norms(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), "batch", only=only)
    model, x = randomized(model).eval(), torch.randn(B, T, C)
    expected = model(x)
    assert fold_norms(model, x) == ([("layers.0.norm2", "layers.0.linear1")] if norm_first else [])
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


class InADict(nn.Sequential):
    def forward(self, x):
        return {"y": (super().forward(x), 3)}


class ReadsItsNorm(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * self[1].weight.mean()


class Tied(nn.Sequential):
    """As an output projection that is tied to the embeddings."""

    def __init__(self):
        super().__init__(nn.Linear(C, C), nn.ReLU(), nn.LayerNorm(C), nn.Linear(C, C))
        self[3].weight = self[0].weight


@pytest.mark.parametrize(
    "make",
    [
        Tied,
        lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(C), nn.utils.parametrizations.weight_norm(nn.Linear(C, C))),
        lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(C), prune.identity(nn.Linear(C, C), "weight")),
        lambda: ReadsItsNorm(nn.ReLU(), nn.LayerNorm(C), nn.Linear(C, C)),
    ],
    ids=["tied", "weight norm", "pruned", "read"],
)
def test_what_cannot_be_folded_is_left_as_it_is(make):
    model, x = randomized(convert_norms(make(), "batch")).eval(), torch.randn(B, C)
    expected, modules, parameters = model(x), dict(model.named_modules()), [*map(id, model.parameters())]
    assert fold_norms(model, x) == []
    assert dict(model.named_modules()) == modules and model(x).equal(expected)
    assert [*map(id, model.parameters())] == parameters
