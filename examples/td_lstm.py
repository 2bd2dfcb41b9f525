"""Sentiment of sentences by a time-delay LSTM: its gates sum over h of 1, 2 and 4 words before, as `examples.td_rnn`.

python -m examples.td_lstm
python -m examples.td_lstm --train trees/train.txt --test trees/dev.txt --hidden 128
"""

from __future__ import annotations

from collections.abc import Sequence

from examples import td_rnn
from tfmem import dynamic


class TDLSTM(td_rnn.TDNet):
    """Gates are input, forget, output and update, each of the sums; the cell is that of one word before."""

    gates = 4
    vectors = 2

    def of_word(self, children, word):
        i, f, o, u = dynamic.split(self.sums(word, [h for h, _ in children]), 4)
        c = dynamic.sigmoid(i) * dynamic.tanh(u)
        if children:
            c = c + dynamic.sigmoid(f) * children[0][1]
        return dynamic.sigmoid(o) * dynamic.tanh(c), c


def main(given: Sequence[str] | None = None) -> list[float]:
    return td_rnn.train(TDLSTM, __doc__, given)


if __name__ == "__main__":
    main()
