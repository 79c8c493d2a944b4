"""The forms that a weight can be decomposed in, one file each, and finding the one that a layer takes.

`base.py` says what a form is. A form that a weight has nothing for (`Form.takes`) gives way to the channel form. A
transposed convolution has the pointwise form where others have the channel or the spatial one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from decomposable.core.forms.base import Form
from decomposable.core.forms.channel import Channel
from decomposable.core.forms.matrix import MatrixForm
from decomposable.core.forms.pointwise import Pointwise
from decomposable.core.forms.spatial import Spatial
from decomposable.core.forms.tucker import Tucker
from decomposable_edge.errors import InvalidArgumentError

FORMS: Mapping[str, Form] = {form.name: form for form in (Spatial(), Channel(), Tucker())}
"""Those that can be asked for."""

TAKEN: Mapping[str, Form] = {**FORMS, Pointwise.name: Pointwise()}
"""Those that a layer can have."""

MATRIX_FORMS = tuple(name for name, form in FORMS.items() if isinstance(form, MatrixForm))
"""Those with one cut, whose weights are a matrix."""

DEFAULT = "spatial"

FormOf = str | Mapping[str, str]
"""A form for all layers, or one by name pattern, of which the first that matches a layer counts. As text, the latter is
"layer4.*:tucker,*:spatial".
"""


def check_form(form: FormOf, allowed: Sequence[str] = tuple(FORMS)) -> FormOf:
    """Return `form` if it is one of the allowed, or says only such by name pattern, as a mapping; else raise.

    >>> check_form("layer4.*:tucker,*:spatial")
    {'layer4.*': 'tucker', '*': 'spatial'}
    """
    if isinstance(form, str) and ":" in form:
        parts = (part.rpartition(":") for part in form.split(","))
        form = {pattern.strip(): one.strip() for pattern, _, one in parts}
    if isinstance(form, Mapping):
        for pattern, one in form.items():
            if not isinstance(pattern, str) or not isinstance(one, str) or one not in allowed:
                raise InvalidArgumentError(f"form[{pattern!r:.80}]={one!r:.80}; allowed: {_some(allowed)}")
    elif not isinstance(form, str) or form not in allowed:
        raise InvalidArgumentError(f"form={form!r:.80} is not known; allowed: {_some(allowed)}")
    return form


def short_form(form: FormOf) -> str:
    """What curves call it.

    >>> short_form("spatial"), short_form("layer4.*:tucker,*:spatial")
    ('sp', 'tk+sp')
    """
    checked = check_form(form)
    names = (checked,) if isinstance(checked, str) else checked.values()
    return "+".join(dict.fromkeys(FORMS[name].short for name in names))


def is_form(form: FormOf) -> bool:
    """Whether it is one."""
    try:
        check_form(form)
    except InvalidArgumentError:
        return False
    return True


def check_matrix_form(form: FormOf, asker: str) -> FormOf:
    """The same for what is about a layer's matrix, and about forms with one cut only."""
    try:
        return check_form(form, MATRIX_FORMS)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{asker}: {error}") from None


def form_named(form: FormOf, name: str) -> str:
    """The form that is asked for a layer of this name; of patterns the first one that matches, else the default."""
    if isinstance(form, str):
        return form
    return next((one for pattern, one in form.items() if fnmatchcase(name, pattern)), DEFAULT)


def check_patterns(form: FormOf, names: Sequence[str]) -> None:
    """Refuse a pattern that matches none of the layers: it is a typo."""
    for pattern in () if isinstance(form, str) else form:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidArgumentError(f"form: the pattern {pattern!r:.80} matches none of the {len(names)} layers")


def form_for(shape: Sequence[int], form: str, *, transposed: bool = False) -> str:
    """The form a weight of this shape takes: 1×1 kernels and linear layers have nothing spatial to split.

    >>> form_for((8, 4, 1, 1), "spatial"), form_for((8, 4, 3, 3), "spatial")
    ('channel', 'spatial')
    >>> form_for((8, 4, 3, 3), "spatial", transposed=True)
    'pointwise'
    """
    taken = form if FORMS[form].takes(shape) else Channel.name
    return Pointwise.name if transposed and taken in MATRIX_FORMS else taken


def matrix_form(form: str) -> MatrixForm:
    """A form with one cut."""
    found = TAKEN[form]
    assert isinstance(found, MatrixForm), f"{form} has no matrix"
    return found


def matrix_shape(shape: Sequence[int], form: str) -> tuple[int, int]:
    """(M, N) of a weight of this shape, without making the matrix."""
    return matrix_form(form).matrix_shape(shape)


def to_matrix(w_OIHW: Tensor, form: str) -> Tensor:
    """Weight → matrix W of the paper, so that y = Wᵀx. Exact: only the axes move."""
    return matrix_form(form).to_matrix(w_OIHW)


def to_weight(w_MN: Tensor, shape: Sequence[int], form: str) -> Tensor:
    """Matrix → weight of the given shape: the inverse of `to_matrix`."""
    return matrix_form(form).to_weight(w_MN, shape)


def first_weight(p_MR: Tensor, shape: Sequence[int], form: str) -> Tensor:
    """The weight of the first of two layers, input → R bases, from the left factor."""
    return matrix_form(form).first_weight(p_MR, shape)


def second_weight(q_RN: Tensor, shape: Sequence[int], form: str) -> Tensor:
    """The weight of the second of two layers, R bases → output, from the right factor."""
    return matrix_form(form).second_weight(q_RN, shape)


def to_factors(first: Tensor, second: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """The factors P (M × R) and Q (R × N) that two weights stand for: the inverse of the two functions above."""
    return matrix_form(form).to_factors(first, second)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
