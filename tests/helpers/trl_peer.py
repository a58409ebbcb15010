"""TRL's trainers as peers: the loss of one on examples that are tokens already."""

from typing import Any

from torch import Tensor, nn


def loss_of(
    trainer: type[Any], settings: Any, model: nn.Module, reference: nn.Module, examples: list[dict[str, Any]]
) -> Tensor:
    """The mean loss of all `examples`, as one batch, with its graph. settings: the trainer's config."""
    import datasets
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    # Required, and used for its padding only: the examples are tokens.
    words = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")

    class Trainer(trainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    peer = Trainer(
        model=model,
        ref_model=reference,
        args=settings,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(examples),
    )
    (batch,) = peer.get_train_dataloader()
    mean: Tensor = peer.compute_loss(peer.model, batch)
    return mean
