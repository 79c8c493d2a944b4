"""The forms that a weight can be decomposed in, and finding the one that a layer takes.

A form that a weight has nothing for (`Form.takes`) gives way to the channel form. A transposed convolution has the
pointwise form where others have the channel or the spatial one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from decomposable.core.forms.matrix import MatrixForm
from decomposable.core.forms.tucker import HOSVD, Tucker
from decomposable.core.svd import SVD
from decomposable_edge.errors import InvalidArgumentError


def _takes_kernel(shape: Sequence[int]) -> bool:
    return max(shape[2:], default=1) > 1


_SPATIAL = MatrixForm(
    "spatial", "sp", lambda shape: len(shape) == 4 and _takes_kernel(shape), lambda axes: ((False, True), (True, False))
)
_CHANNEL = MatrixForm("channel", "ch", lambda shape: True, lambda axes: ((True,) * axes, (False,) * axes))
_POINTWISE = MatrixForm("pointwise", "pw", lambda shape: True, lambda axes: ((False,) * axes, (True,) * axes))
_TUCKER = Tucker("tucker", "tk", _takes_kernel, lambda axes: ((False,) * axes, (True,) * axes, (False,) * axes))

FORMS: Mapping[str, MatrixForm | Tucker] = {form.name: form for form in (_SPATIAL, _CHANNEL, _TUCKER)}
"""Those that can be asked for."""

TAKEN: Mapping[str, MatrixForm | Tucker] = {**FORMS, _POINTWISE.name: _POINTWISE}
"""Those that a layer can have."""

MATRIX_FORMS = tuple(name for name, form in FORMS.items() if isinstance(form, MatrixForm))
"""Those with one cut, whose weights are a matrix."""

DEFAULT = "spatial"

Decomposition = SVD | HOSVD
"""What one weight was decomposed into."""

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
    asked = form.items() if isinstance(form, Mapping) else [("*", form)]
    for pattern, one in asked:
        if not isinstance(pattern, str) or not isinstance(one, str) or one not in allowed:
            names, came = ", ".join(map(repr, sorted(allowed))), f"{one!r:.80}"
            text = f"form[{pattern!r:.80}]={came}" if isinstance(form, Mapping) else f"form={came} is not known"
            raise InvalidArgumentError.about("form", one, names, f"{text}; allowed: {names}")
    return form


def short_form(form: FormOf) -> str:
    """Return what curves call a form.

    >>> short_form("spatial"), short_form("layer4.*:tucker,*:spatial")
    ('sp', 'tk+sp')
    """
    checked = check_form(form)
    names = (checked,) if isinstance(checked, str) else checked.values()
    return "+".join(dict.fromkeys(FORMS[name].short for name in names))


def is_form(form: FormOf) -> bool:
    """Return whether `check_form` takes it."""
    try:
        return bool(check_form(form))
    except InvalidArgumentError:
        return False


def check_matrix_form(form: FormOf, asker: str) -> FormOf:
    """Check a form for what is about a layer's matrix, and about forms with one cut only."""
    try:
        return check_form(form, MATRIX_FORMS)
    except InvalidArgumentError as error:
        raise InvalidArgumentError.about("form", error.came, str(error.allowed), f"{asker}: {error}") from None


def form_named(form: FormOf, name: str) -> str:
    """Return the form for a layer of this name; of patterns the first one that matches, else the default."""
    if isinstance(form, str):
        return form
    return next((one for pattern, one in form.items() if fnmatchcase(name, pattern)), DEFAULT)


def check_patterns(form: FormOf, names: Sequence[str]) -> None:
    """Refuse a pattern that matches none of the layers: it is a typo."""
    for pattern in () if isinstance(form, str) else form:
        if not any(fnmatchcase(name, pattern) for name in names):
            text = f"form: the pattern {pattern!r:.80} matches none of the {len(names)} layers"
            raise InvalidArgumentError.about("form", pattern, "a pattern that matches a layer", text)


def form_for(shape: Sequence[int], form: str, *, transposed: bool = False) -> str:
    """Return the form a weight of this shape takes: 1×1 kernels and linear layers have nothing spatial to split.

    >>> form_for((8, 4, 1, 1), "spatial"), form_for((8, 4, 3, 3), "spatial")
    ('channel', 'spatial')
    >>> form_for((8, 4, 3, 3), "spatial", transposed=True)
    'pointwise'
    """
    taken = form if FORMS[form].takes(shape) else _CHANNEL.name
    return _POINTWISE.name if transposed and taken in MATRIX_FORMS else taken


def matrix_form(form: str) -> MatrixForm:
    """Return a form with one cut."""
    found = TAKEN[form]
    assert isinstance(found, MatrixForm), f"{form} has no matrix"
    return found


def matrix_shape(shape: Sequence[int], form: str) -> tuple[int, int]:
    """Return (M, N) of a weight of this shape, without making the matrix."""
    return matrix_form(form).matrix_shape(shape)


def to_matrix(w_OIHW: Tensor, form: str) -> Tensor:
    """Return the matrix W of the paper, so that y = Wᵀx. Exact: only the axes move."""
    return matrix_form(form).to_matrix(w_OIHW)


def to_weight(w_MN: Tensor, shape: Sequence[int], form: str) -> Tensor:
    """Return the weight of the given shape: the inverse of `to_matrix`."""
    return matrix_form(form).to_weight(w_MN, shape)


def first_weight(p_MR: Tensor, shape: Sequence[int], form: str) -> Tensor:
    """Return the weight of the first of two layers, input → R bases, from the left factor."""
    rank = p_MR.shape[1]
    return p_MR.mT.reshape(rank, shape[1], *matrix_form(form).chain(shape).kernels[0])


def second_weight(q_RN: Tensor, shape: Sequence[int], form: str) -> Tensor:
    """Return the weight of the second of two layers, R bases → output, from the right factor."""
    rank = q_RN.shape[0]
    return q_RN.reshape(rank, shape[0], *matrix_form(form).chain(shape).kernels[1]).transpose(0, 1)


def to_factors(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors P (M × R) and Q (R × N) that two weights stand for: the inverse of the two above."""
    rank = first.shape[0]
    return first.reshape(rank, -1).mT, second.transpose(0, 1).reshape(rank, -1)
