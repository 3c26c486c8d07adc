"""BPPSA's recurrent classifiers (section 4.1 and 4.2): one recurrent layer and a linear layer on its last state.

Legend: B batch, T time steps, I features of a step, H hidden size, C classes.
"""

from torch import Tensor, nn

from retime.recipes.models.common import choose

CELLS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}


class RecurrentClassifier(nn.Module):
    """Logits `(B, C)` from sequences `(B, T, I)`."""

    def __init__(self, recurrent: nn.RNNBase, classes: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        directions = 2 if recurrent.bidirectional else 1
        self.head = nn.Linear(directions * recurrent.hidden_size, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.recurrent(inputs)[0]
        logits: Tensor = self.head(outputs[:, -1])
        return logits


def recurrent_classifier(
    cell: str = "RNN",
    input_size: int = 1,
    hidden_size: int = 20,
    num_classes: int = 10,
    num_layers: int = 1,
    bidirectional: bool = False,
) -> RecurrentClassifier:
    """BPPSA's network: H = 20, one layer, one direction.

    Args:
        cell: "RNN" (tanh), "GRU" or "LSTM".

    Raises:
        ValueError: another cell.
    """
    choose("cell", cell, CELLS)
    recurrent = CELLS[cell](input_size, hidden_size, num_layers, batch_first=True, bidirectional=bidirectional)
    return RecurrentClassifier(recurrent, num_classes)


class RecurrentTagger(nn.Module):
    """Logits `(B, T, C)` from token ids `(B, T)`."""

    def __init__(self, embedding: nn.Embedding, recurrent: nn.RNNBase, classes: int) -> None:
        super().__init__()
        self.embedding, self.recurrent = embedding, recurrent
        directions = 2 if recurrent.bidirectional else 1
        self.head = nn.Linear(directions * recurrent.hidden_size, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.recurrent(self.embedding(tokens))[0])
        return logits


def recurrent_tagger(
    cell: str = "GRU",
    vocab_size: int = 256,
    hidden_size: int = 128,
    num_classes: int = 256,
    num_layers: int = 1,
    bidirectional: bool = False,
) -> RecurrentTagger:
    """A class for each token, as in tagging or byte by byte language models.

    Args:
        cell: "RNN" (tanh), "GRU" or "LSTM"; its inputs are embeddings of `hidden_size`.

    Raises:
        ValueError: another cell.
    """
    choose("cell", cell, CELLS)
    recurrent = CELLS[cell](hidden_size, hidden_size, num_layers, batch_first=True, bidirectional=bidirectional)
    return RecurrentTagger(nn.Embedding(vocab_size, hidden_size), recurrent, num_classes)
