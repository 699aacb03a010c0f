"""A process of user code that answers with what it got, in the order that its messages ask for."""

import os
import signal
import time

from paceline.user_code.child import connect
from paceline.user_code.frames import encode, receive


def main() -> None:
    """Answer until the service closes the connection."""
    with connect() as connection:
        load = receive(connection)
        connection.sendall(encode({"loaded": load}))
        kept = []
        while True:
            message = receive(connection)
            match message.get("do"):
                case "keep":
                    kept.append(message)
                case "answer kept":
                    for each in reversed([*kept, message]):
                        connection.sendall(encode({"id": each["id"], "said": each.get("say")}))
                    kept = []
                case "die":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "exit":
                    os._exit(7)
                case "print":
                    print("noise")
                    os.write(1, b"noise below Python\n")
                    connection.sendall(encode({"id": message["id"], "said": "printed"}))
                case "nonsense":
                    connection.sendall(b"\0\0\0\3abc")
                case "sleep":
                    time.sleep(3600)
