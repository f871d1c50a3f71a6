package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// observer watches Nodes and Events and knows of every Node what became of it, and when. Times are of this process's monotonic clock:
// creationTimestamp knows no parts of a second.
type observer struct {
	// changed gets a value after every change; it holds one, for one receiver.
	changed chan struct{}

	mu      sync.Mutex
	records map[string]*record
}

// record is what is known of one machine's Node.
type record struct {
	member *member
	node   *corev1.Node // as last seen, or nil
	// registered is when the request that created the Node had been answered, released when the Node was first seen without the taint;
	// zero: not yet.
	registered time.Time
	released   time.Time
	// early is what was wrong with the Node when it was released, wrong what is wrong with it now.
	early []string
	wrong []string
	// said is the last warning that talos-ccm gave of the Node.
	said string
}

func newObserver(f *fleet) *observer {
	o := &observer{changed: make(chan struct{}, 1), records: make(map[string]*record, len(f.members))}

	for _, m := range f.members {
		o.records[m.name] = &record{member: m, wrong: []string{"it is not registered"}}
	}

	return o
}

// start begins to watch. Stop it by ending ctx, and then calling the function that it returns.
func (o *observer) start(ctx context.Context, client kubernetes.Interface) (shutdown func(), err error) {
	factory := informers.NewSharedInformerFactory(client, 0)

	_, err = factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    o.seeNode,
		UpdateFunc: func(_, obj any) { o.seeNode(obj) },
	})
	if err != nil {
		return nil, fmt.Errorf("watch nodes: %w", err)
	}

	_, err = factory.Core().V1().Events().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    o.seeEvent,
		UpdateFunc: func(_, obj any) { o.seeEvent(obj) },
	})
	if err != nil {
		return nil, fmt.Errorf("watch events: %w", err)
	}

	factory.Start(ctx.Done())

	for informer, synced := range factory.WaitForCacheSync(ctx.Done()) {
		if !synced {
			return factory.Shutdown, errors.Join(fmt.Errorf("watch %s: not begun", informer), ctx.Err())
		}
	}

	return factory.Shutdown, nil
}

func (o *observer) seeNode(obj any) {
	now := time.Now()

	node, ok := obj.(*corev1.Node)
	if !ok {
		return
	}

	o.update(node.Name, func(r *record) {
		r.node = node
		r.wrong = r.member.expected.differences(node)

		if r.released.IsZero() && !tainted(node) {
			r.released, r.early = now, r.member.wrongOnRelease(node)
		}
	})
}

// wrongOnRelease is what is wrong with a Node that has just lost its taint.
func (m *member) wrongOnRelease(node *corev1.Node) []string {
	wrong := m.expected.wrongIdentity(node)

	// The late machine learns its metadata and its public address at the same time, and nothing orders the two on their way.
	if !m.pending {
		wrong = append(wrong, m.expected.wrongAddresses(node)...)
	}

	return wrong
}

func (o *observer) seeEvent(obj any) {
	event, ok := obj.(*corev1.Event)
	if !ok || event.InvolvedObject.Kind != "Node" || event.Type != corev1.EventTypeWarning {
		return
	}

	o.update(event.InvolvedObject.Name, func(r *record) { r.said = event.Reason + ": " + event.Message })
}

// noteRegistered is told of every Node after its registration.
func (o *observer) noteRegistered(name string) {
	now := time.Now()

	o.update(name, func(r *record) { r.registered = now })
}

// expect changes what a Node should look like from now on.
func (o *observer) expect(name string, change func(*expectation)) {
	o.update(name, func(r *record) {
		change(&r.member.expected)

		r.wrong = r.member.expected.differences(r.node)
	})
}

func (o *observer) update(name string, change func(*record)) {
	o.mu.Lock()
	defer o.mu.Unlock()

	r := o.records[name]
	if r == nil {
		return // not of this demo
	}

	change(r)

	select {
	case o.changed <- struct{}{}:
	default: // a receiver that has yet to look will see this change too
	}
}

// list returns copies of the records, in the fleet's order.
func (o *observer) list(f *fleet) []record {
	o.mu.Lock()
	defer o.mu.Unlock()

	list := make([]record, len(f.members))
	for i, m := range f.members {
		list[i] = *o.records[m.name]
	}

	return list
}

// get returns a copy of one record.
func (o *observer) get(name string) record {
	o.mu.Lock()
	defer o.mu.Unlock()

	return *o.records[name]
}

// done is true for a Node that was registered, released, and is right.
func (r record) done() bool {
	return !r.registered.IsZero() && !r.released.IsZero() && len(r.wrong) == 0
}

// took is the time from the creation of the Node to the removal of the taint.
func (r record) took() time.Duration { return max(0, r.released.Sub(r.registered)) }
