package main

import (
	"context"
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
	cloudproviderapi "k8s.io/cloud-provider/api"
)

// stage is what happens to a Node, in order, except that pod CIDRs may come first.
type stage int

const (
	registered stage = iota
	initialized
	allocated
	requested // the CSR of its kubelet
	approved
	issued
	deleted
	stages
)

// Reasons of Events.
const (
	reasonPending = "MetadataPending"
	reasonGone    = "NodeGone"
)

// record has what is known about a Node.
type record struct {
	*member
	node *corev1.Node // nil until it is registered
	// times has when each stage was first seen. The resolution of timestamps of Kubernetes is a second.
	times [stages]time.Time
	// csr and subjects are the name of the latest CSR and the names and addresses in it.
	csr      string
	subjects []string
	// warning is the last Event about the Node, gone the last that says that its machine is gone.
	warning, gone string
	// pending is true once an Event has said that the metadata of the machine is pending.
	pending bool
}

func (r record) reached(s stage) bool { return !r.times[s].IsZero() }

func (r *record) reach(s stage) {
	if !r.reached(s) {
		r.times[s] = time.Now()
	}
}

// done reports whether the Node is initialized and has a pod CIDR and a certificate for its addresses.
func (r record) done() bool {
	return r.reached(initialized) && r.reached(allocated) && r.reached(issued)
}

// watcher watches Nodes, CSRs and Events.
type watcher struct {
	changed chan struct{} // gets a value after changes
	// ask is called if the kubelet of a Node needs a certificate, because the Node has new addresses.
	ask func(nodename, csr string, subjects []string)

	mu      sync.Mutex
	records map[string]*record // by nodename
}

func newWatcher(members []*member) *watcher {
	w := &watcher{changed: make(chan struct{}, 1), records: map[string]*record{}}
	for _, m := range members {
		w.records[m.name] = &record{member: m}
	}

	return w
}

// start starts to watch until ctx is done.
func (w *watcher) start(ctx context.Context, client kubernetes.Interface) error {
	factory := informers.NewSharedInformerFactory(client, 0)

	for _, informer := range []cache.SharedIndexInformer{
		factory.Core().V1().Nodes().Informer(),
		factory.Certificates().V1().CertificateSigningRequests().Informer(),
		factory.Core().V1().Events().Informer(),
	} {
		_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    w.see,
			UpdateFunc: func(_, obj any) { w.see(obj) },
			DeleteFunc: func(obj any) {
				if node, ok := obj.(*corev1.Node); ok {
					w.update(node.Name, func(r *record) { r.reach(deleted) })
				}
			},
		})
		if err != nil {
			return fmt.Errorf("watch: %w", err)
		}
	}

	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())

	return ctx.Err()
}

func (w *watcher) see(obj any) {
	switch obj := obj.(type) {
	case *corev1.Node:
		w.update(obj.Name, func(r *record) { w.seeNode(r, obj) })
	case *certificatesv1.CertificateSigningRequest:
		w.update(strings.TrimPrefix(obj.Spec.Username, "system:node:"), func(r *record) {
			if obj.Name != r.csr {
				return
			}

			if _, ok := condition(obj, certificatesv1.CertificateApproved); ok {
				r.reach(approved)
			}

			if len(obj.Status.Certificate) > 0 {
				r.reach(issued)
			}
		})
	case *corev1.Event:
		if obj.InvolvedObject.Kind == "Node" && obj.Type == corev1.EventTypeWarning {
			w.update(obj.InvolvedObject.Name, func(r *record) {
				r.warning = obj.Reason + ": " + obj.Message
				r.pending = r.pending || obj.Reason == reasonPending

				if obj.Reason == reasonGone {
					r.gone = r.warning
				}
			})
		}
	}
}

func (w *watcher) seeNode(r *record, node *corev1.Node) {
	r.node = node
	r.reach(registered)

	if node.Spec.PodCIDR != "" {
		r.reach(allocated)
	}

	if slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintExternalCloudProvider }) {
		return
	}

	r.reach(initialized)

	// A kubelet requests a certificate for all addresses of its Node. These Nodes have a loopback address, too, for which no
	// certificate is approved.
	subjects := slices.DeleteFunc(addressesOf(node, ""), func(address string) bool { return strings.HasPrefix(address, "127.") })
	if slices.Equal(subjects, r.subjects) {
		return
	}

	r.subjects = subjects
	r.csr = fmt.Sprintf("%s-%d", node.Name, time.Now().UnixNano())

	for _, s := range []stage{requested, approved, issued} {
		r.times[s] = time.Time{}
	}

	r.reach(requested)
	w.ask(node.Name, r.csr, subjects)
}

func (w *watcher) update(name string, change func(*record)) {
	w.mu.Lock()
	defer w.mu.Unlock()

	if r := w.records[name]; r != nil {
		change(r)
	}

	select {
	case w.changed <- struct{}{}:
	default: // the receiver will see this change, too
	}
}

// get returns a copy of a record.
func (w *watcher) get(name string) record {
	w.mu.Lock()
	defer w.mu.Unlock()

	return *w.records[name]
}

// list returns copies of the records of members.
func (w *watcher) list(members []*member) []record {
	records := make([]record, len(members))
	for i, m := range members {
		records[i] = w.get(m.name)
	}

	return records
}

// addressesOf returns the sorted addresses of a type, or of all types if it is empty.
func addressesOf(node *corev1.Node, kind corev1.NodeAddressType) []string {
	var list []string

	for _, address := range node.Status.Addresses {
		if kind == "" || address.Type == kind {
			list = append(list, address.Address)
		}
	}

	slices.Sort(list)

	return slices.Compact(list)
}

// condition returns the condition of a CSR.
func condition(csr *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType) (certificatesv1.CertificateSigningRequestCondition, bool) {
	i := slices.IndexFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool { return c.Type == kind })
	if i < 0 {
		return certificatesv1.CertificateSigningRequestCondition{}, false
	}

	return csr.Status.Conditions[i], true
}
