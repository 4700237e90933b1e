"""Rules about messages: each value that crosses ranks is sent once and received once, in one order and one format."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....core.schedule.action import Action, Kind
from ..facts import Facts, MessageFormats
from .blocking import NONE
from .rule import Rule, Violation
from .view import View

_COUNTERPART = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
"""The other end of each message, and how many stages on it is."""


def send_without_receive(view: View) -> Iterator[Violation]:
    """Sends of values that cross ranks whose receive is not there."""
    for hops in view.hops:
        for index in np.sort(hops.send[hops.crossing & (hops.send != NONE) & (hops.receive == NONE)]):
            what = (
                f"the {hops.value} is sent, but {_counterpart(view, index)} is not there: this send would wait "
                "for ever."
            )
            yield Violation(int(index), int(view.rank[index]), what)


def receive_without_send(view: View) -> Iterator[Violation]:
    """Receives of values that cross ranks whose send is not there."""
    for hops in view.hops:
        for index in np.sort(hops.receive[hops.crossing & (hops.receive != NONE) & (hops.send == NONE)]):
            what = (
                f"the {hops.value} is received, but {_counterpart(view, index)} is not there: this receive would "
                "wait for ever."
            )
            yield Violation(int(index), int(view.rank[index]), what)


def missing_message(view: View) -> Iterator[Violation]:
    """Uses of a value from another rank that is neither sent nor received."""
    for hops in view.hops:
        absent = hops.crossing & (hops.user != NONE) & (hops.send == NONE) & (hops.receive == NONE)
        for index in np.sort(hops.user[absent]):
            what = (
                f"it needs the {hops.value} of the neighbour stage on another rank, which is neither sent nor received."
            )
            yield Violation(int(index), int(view.rank[index]), what)


def needless_message(view: View) -> Iterator[Violation]:
    """Messages past the ends of the pipeline or inside one rank."""
    ends = ((Kind.SEND_F, -1), (Kind.RECV_F, 0), (Kind.SEND_B, 0), (Kind.RECV_B, -1))
    beyond = [view.first(kind)[stage] for kind, stage in ends]
    inside = [table[~hops.crossing] for hops in view.hops for table in (hops.send, hops.receive)]
    for tables, what in (
        (beyond, "there is no stage on the other side."),
        (inside, ("both stages are on this rank: nothing to send.")),
    ):
        found = np.concatenate([table.ravel() for table in tables])
        for index in np.sort(found[found != NONE]):
            yield Violation(int(index), int(view.rank[index]), what)


def send_without_payload(view: View) -> Iterator[Violation]:
    """Sends that come before the action that makes their value."""
    for hops in view.hops:
        early = (hops.send != NONE) & (hops.maker != NONE) & (hops.send < hops.maker) & hops.crossing
        for send, maker in sorted(zip(hops.send[early].tolist(), hops.maker[early].tolist(), strict=True)):
            yield Violation(
                send,
                int(view.rank[send]),
                (f"the {hops.value} is sent before it is made ({view.place(maker)})."),
                (maker,),
            )


def late_receive(view: View) -> Iterator[Violation]:
    """Receives that come after the action that uses their value."""
    for hops in view.hops:
        late = (hops.receive != NONE) & (hops.user != NONE) & (hops.receive > hops.user) & hops.crossing
        for receive, user in sorted(zip(hops.receive[late].tolist(), hops.user[late].tolist(), strict=True)):
            what = f"the {hops.value} is received after it is used ({view.place(user)})."
            yield Violation(receive, int(view.rank[receive]), what, (user,))


def message_order(view: View) -> Iterator[Violation]:
    """Places where a rank receives in another order than its peer sends, per ordered pair and direction."""
    for hops in view.hops:
        send, receive = hops.matched
        order = np.lexsort((send, view.rank[receive], view.rank[send]))
        send, receive = send[order], receive[order]
        same_pair = (view.rank[send][1:] == view.rank[send][:-1]) & (view.rank[receive][1:] == view.rank[receive][:-1])
        for i in np.flatnonzero(same_pair & (receive[1:] < receive[:-1])).tolist():
            what = (
                f"rank {view.rank[send[i]]} sends {view.token(send[i])} and then {view.token(send[i + 1])}, "
                f"but this rank receives {view.token(receive[i + 1])} before {view.token(receive[i])}."
            )
            yield Violation(
                int(receive[i + 1]),
                int(view.rank[receive[i + 1]]),
                what,
                (int(receive[i]), int(send[i]), int(send[i + 1])),
            )


def message_format(view: View) -> Iterator[Violation]:
    """Hops whose two ends disagree about shape or type."""
    formats = view.facts.messages
    assert formats is not None, "the rule needs formats"
    for stage, hop in enumerate(view.hops[0].user):
        sent, expected = formats.outputs[stage], formats.inputs[stage + 1]
        if _spaceless(sent) != _spaceless(expected):
            carried = view.hops[0].receive[stage]
            found = np.concatenate([carried[carried != NONE], hop[hop != NONE]])
            what = (
                f"stage {stage} sends {sent}, and stage {stage + 1} expects {expected}; gradients go back the same way."
            )
            yield Violation(int(found[0]), int(view.rank[found[0]]), what)


def _counterpart(view: View, index: int) -> str:
    """The receive that a send needs, or the send that a receive needs, with its rank: `1RECV_F0 on rank 1`."""
    action = view.schedule.actions[int(index)]
    kind, step = _COUNTERPART[action.kind]
    other = Action(action.stage + step, kind, action.microbatch)
    return f"{other} on rank {view.owner_table[other.stage, other.microbatch]}"


def _spaceless(text: str) -> str:
    return "".join(text.split())


_RIGHT_0 = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP\n"
_RIGHT_1 = "1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n"

MESSAGE_RULES = (
    Rule(
        "send-without-receive",
        "Every send has a receive of the same kind, stage and microbatch on the neighbour's rank.",
        "Add the receive, or remove the send.",
        _RIGHT_0 + "1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n",
        send_without_receive,
    ),
    Rule(
        "receive-without-send",
        "Every receive has a send of the same kind, stage and microbatch on the neighbour's rank.",
        "Add the send, or remove the receive.",
        "0F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP\n" + _RIGHT_1,
        receive_without_send,
    ),
    Rule(
        "missing-message",
        "A value that is used on another rank is sent and received.",
        "Add the SEND and the RECV, or leave all messages to `lower`.",
        "0F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP\n1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n",
        missing_message,
    ),
    Rule(
        "needless-message",
        "Only values that another rank uses are sent.",
        "Remove the message.",
        "0F0,0SEND_F0,0B0,0REDUCE_GRAD,0STEP\n",
        needless_message,
    ),
    Rule(
        "send-without-payload",
        "A send comes after the action that makes its value.",
        "Move the send behind it.",
        "0SEND_F0,0F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP\n" + _RIGHT_1,
        send_without_payload,
    ),
    Rule(
        "late-receive",
        "A receive comes before the action that uses its value.",
        "Move the receive in front of it.",
        _RIGHT_0 + "1F0,1RECV_F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n",
        late_receive,
    ),
    Rule(
        "message-order",
        "Between two ranks, in each direction, receives have the order of the sends (NCCL has no tags).",
        "Give both ranks the same order.",
        "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0STEP\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1STEP\n",
        message_order,
    ),
    Rule(
        "message-format",
        "A message is received in the shape and type in which it is sent.",
        "Make both stages agree: transports move bytes, and a message of another size ends or corrupts the receiver.",
        _RIGHT_0 + _RIGHT_1,
        message_format,
        "messages",
        Facts(messages=MessageFormats(outputs=("bf16[1,32,64]", ""), inputs=("", "fp32[1,32,64]"))),
    ),
)
