package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced"
)

const bucketName = "BENCH"

// fillBucket puts n keys once.
func fillBucket(ctx context.Context, js jetstream.JetStream, c *benchCase) error {
	_, err := js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: bucketName, Storage: jetstream.MemoryStorage})
	if err != nil {
		return err
	}
	return publish(ctx, js, c.n, c.size, func(i int) string {
		return fmt.Sprintf("$KV.%s.shelf.%d.item.%d", bucketName, i%97, i)
	})
}

// snapshot reads the bucket until the reader says that this was all.
func snapshot(ctx context.Context, l *loop) error {
	w, err := paced.NewWatcher(l.js, paced.WatchConfig{Bucket: bucketName, Listener: tellRebuilds})
	if err != nil {
		return err
	}
	var last uint64
	for e, err := range w.Snapshot(ctx) {
		if err != nil {
			return err
		}
		l.hit(e.Value())
		last = e.Revision()
	}
	return l.finish(last)
}

// pacedWatch reads the bucket and stays for updates.
func pacedWatch(ctx context.Context, l *loop) error {
	for e, err := range paced.Watch(ctx, l.js, paced.WatchConfig{Bucket: bucketName, Listener: tellRebuilds}) {
		if err != nil {
			return err
		}
		if !l.hit(e.Value()) {
			if err := l.finish(e.Revision()); err != nil {
				return err
			}
		}
	}
	return nil
}

// watchAll reads the bucket until the watcher says that this was all, and stays
// for updates where it is to be idle. A watcher that cannot be made, because
// the answer is behind the data of others, is tried again.
func watchAll(ctx context.Context, l *loop) error {
	kv, err := l.js.KeyValue(ctx, bucketName)
	if err != nil {
		return err
	}
	w, err := kv.WatchAll(ctx)
	for err != nil {
		if ctx.Err() != nil {
			return err
		}
		w, err = kv.WatchAll(ctx)
	}
	// Not stopped: it goes with the process, and Stop can wait for a callback
	// that waits for the channel.
	var last uint64
	for {
		select {
		case e, ok := <-w.Updates():
			if !ok {
				return errors.New("the watcher ended without an error")
			}
			if e != nil {
				l.hit(e.Value())
				last = e.Revision()
				continue
			}
			if err := l.finish(last); err != nil || l.idle == 0 {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func pacedKeys(ctx context.Context, l *loop) error {
	for _, err := range paced.Keys(ctx, l.js, bucketName) {
		if err != nil {
			return err
		}
		l.hit(nil)
	}
	return l.finish(uint64(l.n))
}

func listKeys(ctx context.Context, l *loop) error {
	kv, err := l.js.KeyValue(ctx, bucketName)
	if err != nil {
		return err
	}
	lister, err := kv.ListKeys(ctx)
	if err != nil {
		return err
	}
	for range lister.Keys() {
		l.hit(nil)
	}
	return l.finish(uint64(l.n))
}
