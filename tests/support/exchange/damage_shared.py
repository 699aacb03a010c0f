"""Helpers of the tests of damage and others."""

from __future__ import annotations

from exchange_service import Peer, Service

from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb


def client(service: Service, member_id: str, role: common_pb2.Role.ValueType, **fields: object) -> Peer:
    service.world.enter(member_id, role, **fields)
    return service.peer(member_id, role)


def asked(step: int, wait_s: float, session: int) -> pb.ExchangeRequest:
    batch = pb.BatchRequest(step=step, rank=0, world_size=1, wait_s=wait_s)
    return pb.ExchangeRequest(session=session, batch=batch)
