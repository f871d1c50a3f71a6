package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// observer watches Nodes, certificate requests and Events, and knows of every Node what became of it, and when. Times are of this process's monotonic clock:
// creationTimestamp knows no parts of a second.
type observer struct {
	// changed gets a value after every change; it holds one, for one receiver.
	changed chan struct{}
	// seen is called for every Node observed without the taint.
	seen func(nodename string)
	// authority is who issues the serving certificates.
	authority *x509.CertPool

	mu      sync.Mutex
	records map[string]*record // by nodename
}

// record is what is known of one machine's Node.
type record struct {
	member *member
	node   *corev1.Node // as last seen, or nil
	// registered is when the request that created the Node had been answered, released when the Node was first seen without the taint,
	// allocated when it was first seen with a pod CIDR; zero: not yet.
	registered, released, allocated time.Time
	// certificate is the latest request of the kubelet for all that the Node lists; hostile is one for what is another's.
	certificate, hostile request
	requests             int // made so far, the hostile one apart
	// early is what was wrong with the Node when it was released, wrong what is wrong with it now.
	early []string
	wrong []string
	// said is the last warning that talos-ccm gave of the Node, before it was released or since.
	said string
	// waits is true once it has said that the Node waits for the machine's metadata.
	waits bool
	// verdict is the last NodeRenamed or NodeGone Event, judged when it was seen, and deleted when the Node was.
	verdict         string
	judged, deleted time.Time
}

func newObserver(f *fleet) *observer {
	o := &observer{
		changed:   make(chan struct{}, 1),
		seen:      func(string) {},
		authority: x509.NewCertPool(),
		records:   make(map[string]*record, len(f.members)),
	}

	for _, m := range f.members {
		o.add(m, 0)
	}

	return o
}

// add begins to observe the Node of a machine, which has made a number of requests already, under another name.
func (o *observer) add(m *member, requests int) {
	o.mu.Lock()
	defer o.mu.Unlock()

	o.records[m.name] = &record{member: m, requests: requests, wrong: []string{"it is not registered"}}
}

// start begins to watch. Stop it by ending ctx, and then calling the function that it returns.
func (o *observer) start(ctx context.Context, client kubernetes.Interface) (shutdown func(), err error) {
	factory := informers.NewSharedInformerFactory(client, 0)

	for what, watch := range map[string]struct {
		informer cache.SharedIndexInformer
		see      func(obj any)
	}{
		"nodes":                {factory.Core().V1().Nodes().Informer(), o.seeNode},
		"certificate requests": {factory.Certificates().V1().CertificateSigningRequests().Informer(), o.seeRequest},
		"events":               {factory.Core().V1().Events().Informer(), o.seeEvent},
	} {
		_, err := watch.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    watch.see,
			UpdateFunc: func(_, obj any) { watch.see(obj) },
			DeleteFunc: o.seeDeletion,
		})
		if err != nil {
			return nil, fmt.Errorf("watch %s: %w", what, err)
		}
	}

	factory.Start(ctx.Done())

	for informer, synced := range factory.WaitForCacheSync(ctx.Done()) {
		if !synced {
			return factory.Shutdown, errors.Join(fmt.Errorf("watch %s: not synced", informer), ctx.Err())
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

		if r.allocated.IsZero() && node.Spec.PodCIDR != "" {
			r.allocated = now
		}

		if r.released.IsZero() && !tainted(node) {
			r.released, r.early, r.said = now, r.member.wrongOnRelease(node), ""
		}
	})

	if !tainted(node) {
		o.seen(node.Name)
	}
}

// seeDeletion notes the deletion of a Node; the keys of other objects are not names of Nodes.
func (o *observer) seeDeletion(obj any) {
	if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj); err == nil {
		o.update(key, func(r *record) { r.deleted = time.Now() })
	}
}

// wrongOnRelease is what is wrong with a Node that has just lost its taint.
func (m *member) wrongOnRelease(node *corev1.Node) []string {
	wrong := slices.Concat(m.expected.wrongIdentity(node), m.expected.wrongTaints(node))

	// The late machine learns its metadata and its public address at the same time, and nothing orders the two on their way.
	if !m.pending {
		wrong = append(wrong, m.expected.wrongAddresses(node)...)
	}

	return wrong
}

func (o *observer) seeRequest(obj any) {
	csr, ok := obj.(*certificatesv1.CertificateSigningRequest)
	if !ok {
		return
	}

	o.updateRequest(csr.Name, func(r *request, nodename string) { r.see(csr, nodename, o.authority) })
}

func (o *observer) seeEvent(obj any) {
	event, ok := obj.(*corev1.Event)
	if !ok || event.Type != corev1.EventTypeWarning {
		return
	}

	said := event.Reason + ": " + event.Message

	switch event.InvolvedObject.Kind {
	case "Node":
		o.update(event.InvolvedObject.Name, func(r *record) {
			r.waits = r.waits || event.Reason == reasonPending

			if event.Reason == reasonRenamed || event.Reason == reasonGone {
				r.verdict, r.judged = said, time.Now()
			}

			// While a Node waits for its machine's metadata, that Event takes precedence over others.
			if event.Reason == reasonPending || !r.waits || !r.released.IsZero() {
				r.said = said
			}
		})
	case "CertificateSigningRequest":
		o.updateRequest(event.InvolvedObject.Name, func(r *request, _ string) { r.said = said })
	}
}

// A request is called by its Node, so that it is known whose it is; the first part says what it is for.
const (
	ownCertificate     = "own"
	hostileCertificate = "hostile"
)

// nextRequest notes the request that the kubelet of the Node has to make now, if any.
func (o *observer) nextRequest(nodename string) (next request, wanted bool) {
	o.update(nodename, func(r *record) {
		subjects := subjectsOf(r.node)
		if slices.Equal(subjects, r.certificate.subjects) {
			return
		}

		r.requests++
		r.certificate = request{name: fmt.Sprintf("%s-%d.%s", ownCertificate, r.requests, nodename), subjects: subjects, asked: time.Now()}
		next, wanted = r.certificate, true
	})

	return next, wanted
}

// noteHostile notes the request of the kubelet of a Node for what is another's.
func (o *observer) noteHostile(nodename string, subjects []string) (hostile request) {
	o.update(nodename, func(r *record) {
		r.hostile = request{name: hostileCertificate + "." + nodename, subjects: subjects, asked: time.Now()}
		hostile = r.hostile
	})

	return hostile
}

// updateRequest changes what is known of a request, if it is the latest of its Node.
func (o *observer) updateRequest(name string, change func(r *request, nodename string)) {
	_, nodename, _ := strings.Cut(name, ".")

	o.update(nodename, func(r *record) {
		for _, known := range []*request{&r.certificate, &r.hostile} {
			if known.name == name {
				change(known, nodename)
			}
		}
	})
}

// noteRegistered is called for every Node after its registration.
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

// problems are what keeps the Node from being done, as sentences.
func (r record) problems() []string {
	switch {
	case len(r.wrong) > 0:
		return r.wrong
	case r.certificate.wrong != nil:
		return []string{"its certificate is not right: " + r.certificate.wrong.Error()}
	case r.certificate.issued.IsZero():
		return []string{"its certificate: " + r.certificate.state()}
	case !slices.Equal(r.certificate.subjects, subjectsOf(r.node)):
		return []string{differ("what its certificate is for", r.certificate.subjects, subjectsOf(r.node))}
	}

	return nil
}

// done is true for a Node that was registered, released, and is right, with its certificate.
func (r record) done() bool {
	return !r.registered.IsZero() && !r.released.IsZero() && len(r.problems()) == 0
}
