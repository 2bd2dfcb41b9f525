"""A warning names the user's line."""

import warnings

import tfmem
from custom_ops.errors import warn


def test_a_warning_names_the_line_of_whoever_called_in():
    source = compile("def inside(warn):\n    warn('budget missed')\n", "inside.py", "exec")
    names = {"__name__": "tensorflow.python.inside"}
    exec(source, names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names["inside"](warn)
        warn("directly")
    assert [str(each.message) for each in caught] == ["budget missed", "directly"]
    assert all(each.category is tfmem.TfmemWarning for each in caught)
    assert [each.filename for each in caught] == [__file__, __file__]


def test_without_a_user_the_warning_is_shown_all_the_same():
    names = {"__name__": "tfmem.missing"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import threading

        source = compile("def run():\n    warn('from a thread')\n", "thread.py", "exec")
        exec(source, names | {"warn": warn}, names)
        names["warn"] = warn
        thread = threading.Thread(target=names["run"])
        thread.start()
        thread.join()
    assert [str(each.message) for each in caught] == ["from a thread"]
