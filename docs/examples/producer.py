"""Orders, the mail about each, and a batch of charges, in the application's own transaction (psycopg 3).

usage: producer.py DATABASE_URL [fail]
"""

import sys

import psycopg
from psycopg.types.json import Jsonb


def place_orders(connection, orders, then_fail):
    with connection.transaction():
        for order in orders:
            connection.execute("INSERT INTO orders (id, customer) VALUES (%s, %s)", (order["id"], order["customer"]))
            connection.execute(
                "SELECT musterd.enqueue('send_mail', %s, idempotency_key => %s)",
                (Jsonb({"to": order["customer"]}), f"order-{order['id']}-mail"),
            )
        batch = connection.execute(
            "SELECT musterd.submit_batch('charge', %s::jsonb, on_done => 'report')", (Jsonb(orders),)
        ).fetchone()[0]
        if then_fail:
            raise RuntimeError("the application changed its mind")
    return batch


if __name__ == "__main__":
    orders = [{"id": 1, "customer": "ada@example.org"}, {"id": 2, "customer": "bob@example.org"}]
    with psycopg.connect(sys.argv[1]) as connection:
        print(place_orders(connection, orders, then_fail=sys.argv[2:] == ["fail"]))
