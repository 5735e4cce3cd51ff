from weftline.engine.serving.http.connection import BODY_BYTES_S, overdue_s


def test_the_time_limit_of_a_request_grows_with_its_body() -> None:
    assert overdue_s(100.0, 90.0, 0, 20.0) == -10.0
    assert overdue_s(111.0, 90.0, 0, 20.0) == 1.0
    assert overdue_s(111.0, 90.0, 2 * BODY_BYTES_S, 20.0) == -1.0
