"""torch.compile and torch.func."""

import pytest
import torch

from pn_fairseq.norms import NORMS, build_norm

CHANNELS = 8
STATEFUL = [name for name in NORMS if name != "layer"]


@pytest.fixture(autouse=True)
def _compile_afresh():
    """torch.compile counts what it has compiled of one function, and gives up at a limit that other tests use up."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(name):
    torch.manual_seed(0)
    return build_norm(name, CHANNELS, layer_scale_groups=2, psi_warmup_updates=2)


@pytest.mark.parametrize("name", list(NORMS))
def test_evaluation_compiles_without_a_graph_break(name):
    norm = make(name)
    x, mask = torch.randn(5, 3, CHANNELS), torch.zeros(3, 5, dtype=torch.bool)
    norm(x)
    norm.eval()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), norm(x, mask))
    torch.testing.assert_close(compiled(x), norm(x))


@pytest.mark.parametrize("name", list(NORMS))
def test_training_under_compile_is_training(name):
    """Outputs, gradients and state, over updates that cross the end of the psi warm-up."""
    plain, other = make(name), make(name)
    compiled = torch.compile(torch.nn.Sequential(other), backend="aot_eager")
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        x = torch.randn(5, 3, CHANNELS, generator=generator)
        dy = torch.randn(5, 3, CHANNELS, generator=generator)
        gradients = []
        for norm, call in ((plain, plain), (other, compiled)):
            norm.set_num_updates(step)
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.backward(dy)
            gradients.append((y.detach(), leaf.grad))
        torch.testing.assert_close(gradients[0], gradients[1])
        torch.testing.assert_close(plain.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", list(NORMS))
def test_functional_call_in_evaluation_under_grad_and_vmap(name):
    norm = make(name)
    norm(torch.randn(20, CHANNELS))
    norm.eval()
    parameters = dict(norm.named_parameters())
    x = torch.randn(6, CHANNELS)

    def loss(parameters, x):
        return torch.func.functional_call(norm, parameters, (x,)).square().sum()

    gradient = torch.func.grad(loss)(parameters, x)
    norm.zero_grad()
    norm(x).square().sum().backward()
    for key, parameter in norm.named_parameters():
        torch.testing.assert_close(gradient[key], parameter.grad)
    per_token = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    torch.testing.assert_close(per_token["bias"].sum(0), norm.bias.grad)


@pytest.mark.parametrize("name", list(NORMS))
def test_grad_transform_in_training(name):
    """torch.func.grad gives the gradients of backward(), and the state moves as it does there."""
    plain, other = make(name), make(name)
    x = torch.randn(6, CHANNELS)

    def loss(parameters, x):
        return torch.func.functional_call(other, parameters, (x,)).square().sum()

    gradient = torch.func.grad(loss)({key: value.detach() for key, value in other.named_parameters()}, x)
    plain(x).square().sum().backward()
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(gradient[key], parameter.grad)
    torch.testing.assert_close(dict(plain.named_buffers()), dict(other.named_buffers()))
