"""The examples of dynamic nets once more, in plain eager TensorFlow, word by word: the loss of one example."""

from __future__ import annotations

import tensorflow as tf


def cross_entropy(label, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)


def affine(matrix, x, bias):
    return tf.linalg.matvec(matrix, x) + bias


def tree_lstm(net, tree):
    def walk(tree):
        if len(tree) == 2:
            i, o, u = tf.split(affine(net.word, net.table[net.vocabulary[tree[1]]], net.word_bias), 3)
            c, below = tf.sigmoid(i) * tf.tanh(u), 0.0
        else:
            (left, left_c, left_loss), (right, right_c, right_loss) = walk(tree[1]), walk(tree[2])
            i, f, g, o, u = tf.split(affine(net.pair, tf.concat([left, right], 0), net.pair_bias), 5)
            c = tf.sigmoid(i) * tf.tanh(u) + tf.sigmoid(f) * left_c + tf.sigmoid(g) * right_c
            below = left_loss + right_loss
        h = tf.sigmoid(o) * tf.tanh(c)
        return h, c, below + cross_entropy(tree[0], affine(net.output, h, net.output_bias))

    return walk(tree)[2]


def rvnn(net, tree):
    def walk(tree):
        if len(tree) == 2:
            p, below = net.table[net.vocabulary[tree[1]]], 0.0
        else:
            (left, left_loss), (right, right_loss) = walk(tree[1]), walk(tree[2])
            p = tf.tanh(affine(net.pair, tf.concat([left, right], 0), net.pair_bias))
            below = left_loss + right_loss
        return p, below + cross_entropy(tree[0], affine(net.output, p, net.output_bias))

    return walk(tree)[1]


def _sums(net, word, before):
    """W x_t + sum over d of U_d h_(t-d) + b."""
    total = affine(net.input, net.table[net.vocabulary[word]], net.bias)
    for delay, matrix in zip((1, 2, 4), net.delayed, strict=True):
        if delay <= len(before):
            total += tf.linalg.matvec(matrix, before[-delay])
    return total


def td_rnn(net, example):
    states = []
    for word in example[0].split():
        states.append(tf.tanh(_sums(net, word, states)))
    return cross_entropy(example[1], affine(net.output, states[-1], net.output_bias))


def td_lstm(net, example):
    states, cell = [], 0.0
    for word in example[0].split():
        i, f, o, u = tf.split(_sums(net, word, states), 4)
        cell = tf.sigmoid(f) * cell + tf.sigmoid(i) * tf.tanh(u)
        states.append(tf.sigmoid(o) * tf.tanh(cell))
    return cross_entropy(example[1], affine(net.output, states[-1], net.output_bias))


def _lstm(lstm, inputs):
    states, h, c = [], tf.zeros([lstm.hidden.shape[1]]), 0.0
    for x in inputs:
        i, f, o, u = tf.split(affine(lstm.input, x, lstm.bias) + tf.linalg.matvec(lstm.hidden, h), 4)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(u)
        h = tf.sigmoid(o) * tf.tanh(c)
        states.append(h)
    return states


def _tagged(net, words, example):
    forth, back = _lstm(net.forth, words), _lstm(net.back, words[::-1])[::-1]
    losses = []
    for f, b, (_, tag) in zip(forth, back, example, strict=True):
        middle = tf.tanh(tf.linalg.matvec(net.middle, tf.concat([f, b], 0)))
        losses.append(cross_entropy(net.tags[tag], tf.linalg.matvec(net.output, middle)))
    return tf.add_n(losses)


def bilstm_tagger(net, example):
    return _tagged(net, [net.table[net.words.get(word, 0)] for word, _ in example], example)


def bilstm_character_tagger(net, example):
    words = []
    for word, _ in example:
        if word in net.words:
            words.append(net.table[net.words[word]])
        else:
            spelled = [net.spelling[net.characters[character]] for character in word]
            ends = [_lstm(net.forth_spelled, spelled)[-1], _lstm(net.back_spelled, spelled[::-1])[-1]]
            words.append(tf.concat(ends, 0))
    return _tagged(net, words, example)


def graph_net(net, molecule):
    states = tf.unstack(molecule.features @ net.encode)
    for layer in range(len(net.kinds)):
        states = [
            tf.nn.relu(
                tf.linalg.matvec(net.own[layer], own, transpose_a=True)
                + tf.linalg.matvec(
                    net.near[layer], tf.add_n([states[other] for other in molecule.neighbours[atom]]), transpose_a=True
                )
                + net.bias[layer]
            )
            for atom, own in enumerate(states)
        ]
    logits = tf.linalg.matvec(net.output, tf.add_n(states), transpose_a=True) + net.output_bias
    return cross_entropy(molecule.label, logits)


def biaffine_parser(net, sentence):
    rows = [net.table[1], *(net.table[net.words[word] + 1] for word, _ in sentence)]
    both = tf.concat([tf.stack(_lstm(net.forth, rows)), tf.stack(_lstm(net.back, rows[::-1])[::-1])], 1)
    heads = tf.nn.relu(tf.matmul(both, net.head, transpose_b=True))
    dependents = tf.nn.relu(tf.matmul(both[1:], net.dependent, transpose_b=True))
    scores = tf.einsum("ne,md,ed->mn", heads, dependents, net.pairs) + tf.linalg.matvec(heads, net.alone)
    return tf.reduce_sum(cross_entropy([head for _, head in sentence], scores))
