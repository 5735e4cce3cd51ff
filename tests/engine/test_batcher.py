"""A batch leaves when it is full, or when its oldest item has waited long enough."""

from weftline.engine.batcher import Batcher
from weftline.pipelines.policy import BatchPolicy


def test_an_item_waits_for_company_and_no_longer() -> None:
    batcher = Batcher(BatchPolicy(items_max=8, wait_max_ms=5))
    batcher.add(7, 100.0)
    assert batcher.take(104.0) == []
    assert batcher.wake_at_ms() == 105.0
    assert batcher.take(105.0) == [(7, 100.0)]
    assert batcher.wake_at_ms() is None


def test_a_full_batch_leaves_at_once_oldest_first() -> None:
    batcher = Batcher(BatchPolicy(items_max=2, wait_max_ms=1000))
    for item in (1, 2, 3):
        batcher.add(item, float(item))
    assert batcher.take(3.0) == [(1, 1.0), (2, 2.0)]
    assert batcher.take(3.0) == []
    assert len(batcher) == 1


def test_a_discarded_item_is_never_taken() -> None:
    batcher = Batcher(BatchPolicy())
    batcher.add(1, 0.0)
    batcher.add(2, 0.0)
    assert batcher.discard(1) and not batcher.discard(1)
    assert batcher.take(0.0) == [(2, 0.0)]


def test_quick_steps_may_take_several_batches_in_one_message() -> None:
    batcher = Batcher(BatchPolicy(items_max=2))
    for item in range(7):
        batcher.add(item, 0.0)
    assert len(batcher.take(0.0, batches=3)) == 6
