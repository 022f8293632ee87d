"""Writing on from prompts with the language model of a run."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from attnzoo.errors import OptionError, RecipeError
from attnzoo.options import whole
from attnzoo.tasks.characters import UNKNOWN, encode
from attnzoo.training.model import Transformer
from attnzoo.training.runs import RunFolder
from attnzoo.training.sampling import Sampling

Stopped = Literal["length", "stop"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one more token adds to the text of one prompt: often a character, nothing where a stop text may begin.

    `stopped` is set in a text's last piece: "stop" before a stop text, "length" after as many tokens as asked for.
    """

    prompt: int
    text: str
    stopped: Stopped | None


@dataclasses.dataclass(frozen=True)
class LanguageModelRun:
    """A trained model, and the characters that its tokens stand for."""

    model: Transformer
    characters: Sequence[str]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Builds the model of a run with its best weights, from its checkpoint alone.

        Raises:
            RecipeError: there is no such run, or its model can't write.
        """
        checkpoint = RunFolder.open(path).load_checkpoint()
        recipe = checkpoint["hyper_parameters"]["recipe"]
        task, variant = recipe["task"]["name"], recipe["attention"]["name"]
        if task != "language_model":
            raise RecipeError(
                f"{path} is a run of the task {task}, which writes nothing: "
                "name a run of language_model, as attnzoo train kv_cached makes one"
            )
        characters = checkpoint.get("task", {}).get("characters")
        if characters is None:
            raise RecipeError(
                f"{path} was trained before runs kept their characters: "
                f"train it again with attnzoo train {path / 'recipe.yaml'}"
            )
        with torch.random.fork_rng(devices=[]):
            model = Transformer(
                vocabulary=len(characters),
                length=recipe["task"]["length"],
                classes=len(characters),
                causal=True,
                pooling="every",
                attention=recipe["attention"],
                **recipe["model"],
            )
        if not model.supports("cache"):
            raise RecipeError(
                f"{path}: the attention {variant} can't decode with a cache; "
                "attnzoo list --supports causal,cache names those that can"
            )
        weights = {name: value for name, value in checkpoint["state_dict"].items() if name.startswith("model.")}
        model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
        return cls(model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), characters)

    def generate(
        self, prompts: Sequence[str], *, tokens: int, sampling: Sampling, stop: Sequence[str] = ()
    ) -> Iterator[Piece]:
        """Writes on from each prompt, and gives the texts piece by piece.

        Prompts are read in one batch, or one after the other where the pattern is tied to places. A text depends on its
        prompt, the prompt's place and the seed, and not on other prompts. The unknown character is never written.

        Args:
            prompts: where one is empty, a line break.
            tokens: the most to write for each prompt.
            stop: a text ends before the first of these.
        Raises:
            OptionError: a value is impossible, or the model has no positions for that many tokens.
        """
        whole("tokens", tokens, most=2**20)
        if "" in stop:
            raise OptionError("stop must not be empty: leave it out to write as many tokens as asked for")
        prompts = [prompt or "\n" for prompt in prompts]
        for number, prompt in enumerate(prompts, start=1):
            self._check_room(f"prompt {number}", len(prompt), tokens)
        if unknown := sorted(set().union(*prompts) - set(self.characters)):
            named = ", ".join(map(repr, unknown))
            warnings.warn(f"the model was not trained on {named}: read as unknown", stacklevel=2)
        read = {i: encode(prompt, self.characters).long() for i, prompt in enumerate(prompts)}
        batches = [read] if self.model.supports("left_padding") else [{i: ids} for i, ids in read.items()]
        return (piece for batch in batches for piece in self._write(batch, tokens, sampling, stop))

    def _check_room(self, name: str, length: int, tokens: int) -> None:
        """Refuses what goes beyond learned positions; the last token is written and never read."""
        most = self.model.length
        if self.model.position_embedding is None or length + tokens - 1 <= most:
            return
        advice = f"lower tokens to {most + 1 - length}" if length <= most else f"shorten it to {most} or less"
        raise OptionError(
            f"{name} has {length} characters, and {tokens} tokens more do not fit: "
            f"the model learned positions for {most}; {advice}"
        )

    def _write(
        self, prompts: Mapping[int, Tensor], tokens: int, sampling: Sampling, stop: Sequence[str]
    ) -> Iterator[Piece]:
        generators = {i: sampling.generator(i) for i in prompts}
        texts = {i: Text(tokens, stop) for i in prompts}
        unknown = torch.tensor([self.characters.index(UNKNOWN)])
        decoder = Decoder(self.model, list(prompts.values()), tokens)
        while True:
            logits = decoder.logits().index_fill(1, unknown, -torch.inf)
            drawn = [sampling.draw(row, generators[i]) for i, row in zip(prompts, logits, strict=True)]
            for (i, text), token in zip(texts.items(), drawn, strict=True):
                if text.stopped is None:
                    yield Piece(i, text.add(self.characters[token]), text.stopped)
            if all(text.stopped for text in texts.values()):
                return
            decoder.append(drawn)


class Decoder:
    """Several sequences at their ends: the prompts padded on the left, then one token after the other.

    Args:
        tokens: how many will be asked for.
    """

    def __init__(self, model: Transformer, prompts: Sequence[Tensor], tokens: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        self.unread = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in zip(self.unread, prompts, strict=True):
            row[longest - len(prompt) :] = prompt
        self.key_mask = None
        if bool((lengths < longest).any()):
            self.key_mask = (torch.arange(longest) >= longest - lengths[:, None]).to(self.device)
        self.caches = model.new_caches(len(prompts), longest + tokens - 1)

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Reads what was not read yet, and gives the logits [b, v] of what comes next."""
        logits = self.model(self.unread.to(self.device), self.key_mask, self.caches)
        return logits[:, -1].cpu()

    def append(self, tokens: Sequence[int]) -> None:
        """Puts one token at the end of each sequence."""
        self.unread = torch.tensor(tokens)[:, None]
        if self.key_mask is not None:
            self.key_mask = torch.nn.functional.pad(self.key_mask, (0, 1), value=True)


class Text:
    """A text that grows up to a stop text or a number of tokens."""

    def __init__(self, tokens: int, stop: Sequence[str]) -> None:
        self.left = tokens
        self.stop = stop
        self.held = ""
        self.stopped: Stopped | None = None

    def add(self, character: str) -> str:
        """What is certain to be in the text and was not given before: the beginning of a stop text is held back."""
        self.left -= 1
        self.held += character
        ends = [self.held.index(stop) for stop in self.stop if stop in self.held]
        if ends:
            self.stopped = "stop"
            return self.held[: min(ends)]
        if self.left == 0:
            self.stopped = "length"
            return self.held
        begun = (n for stop in self.stop for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        certain = len(self.held) - max(begun, default=0)
        given, self.held = self.held[:certain], self.held[certain:]
        return given
