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

// stage is a step of a Node.
type stage int

const (
	registered stage = iota
	pending          // an Event has reported that the metadata of the machine is pending
	initialized
	allocated
	requested // the CSR of its kubelet
	approved
	issued
	deleted
	stages
)

// record has the observed state of a Node.
type record struct {
	*member
	node *corev1.Node // nil until it is registered
	// times has when each stage was first seen. The resolution of timestamps of Kubernetes is a second.
	times [stages]time.Time
	// csr and subjects are the name of the latest CSR and the names and addresses in it.
	csr      string
	subjects []string
	// warning is the last Event about the Node, and gone the last one that reports that its machine is gone.
	warning, gone string
}

func (r record) reached(s stage) bool { return !r.times[s].IsZero() }

// took returns the time between two stages, in milliseconds.
func (r record) took(from, to stage) time.Duration {
	return max(0, r.times[to].Sub(r.times[from])).Round(time.Millisecond)
}

func (r *record) reach(s stage) {
	if !r.reached(s) {
		r.times[s] = time.Now()
	}
}

// watcher watches Nodes, CSRs and Events.
type watcher struct {
	// ask requests a certificate for the kubelet of a Node that has new addresses.
	ask func(nodename, csr string, subjects []string)

	mu      sync.Mutex
	records map[string]*record // by nodename
}

// watch starts a watcher that runs until ctx is done.
func watch(ctx context.Context, client kubernetes.Interface, members []*member, ask func(nodename, csr string, subjects []string)) (*watcher, error) {
	w := &watcher{ask: ask, records: map[string]*record{}}
	for _, m := range members {
		w.records[m.name] = &record{member: m}
	}

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
			return nil, fmt.Errorf("watch: %w", err)
		}
	}

	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())

	return w, ctx.Err()
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

			if len(obj.Status.Conditions) > 0 && obj.Status.Conditions[0].Type == certificatesv1.CertificateApproved {
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

				switch obj.Reason {
				case "MetadataPending":
					r.reach(pending)
				case "NodeGone":
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

	clear(r.times[requested : issued+1])
	r.reach(requested)

	go w.ask(node.Name, r.csr, subjects)
}

func (w *watcher) update(name string, change func(*record)) {
	w.mu.Lock()
	defer w.mu.Unlock()

	if r := w.records[name]; r != nil {
		change(r)
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
