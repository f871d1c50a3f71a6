package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/product"
)

const (
	// timeout is far longer than a wait for talos-ccm takes.
	timeout = 10 * time.Minute
	// pollInterval is short in comparison with what is measured.
	pollInterval = 10 * time.Millisecond
)

// bed is a control plane and machines for one subject. Methods that return no error do nothing after the first error, and
// are not safe for concurrent use.
type bed struct {
	ctx    context.Context //nolint:containedctx // of one measurement
	cancel context.CancelFunc
	err    error

	cluster  *kube.Cluster
	client   kubernetes.Interface
	talos    *talostest.Cluster
	clock    shiftedClock // of the machines
	machines []machine

	informers informers.SharedInformerFactory
	observed  sync.Map // when something was observed first

	subject string
	process *running // of the subject, if the bed started it
	results results
}

// newBed starts everything but the subject.
func newBed(ctx context.Context, machines int, options kube.Options) (*bed, error) {
	b := &bed{}
	b.ctx, b.cancel = context.WithCancel(ctx)

	b.cluster, b.err = kube.Start(ctx, options)
	b.try(func() error { return b.startFleet(machines) })
	b.try(b.watchNodes)

	if b.err != nil {
		return nil, b.close()
	}

	return b, nil
}

// close ends everything in order. It returns the error of the bed, if any.
func (b *bed) close() error {
	if b.process != nil {
		b.fail(b.process.stop())
	}

	b.cancel()

	if b.informers != nil {
		b.informers.Shutdown()
	}

	if b.talos != nil {
		b.talos.Close()
	}

	if b.cluster != nil {
		b.fail(b.cluster.Stop())
	}

	return b.err
}

// record adds the value of a measurement, if it was measured.
func (b *bed) record(name string, value float64) {
	if value > 0 {
		at := key{name, b.subject}
		b.results[at] = append(b.results[at], value)
	}
}

// file returns the path of a file that is removed with the bed.
func (b *bed) file(name string) string { return filepath.Join(b.cluster.LogDir(), name) }

// fail records err unless it is nil.
func (b *bed) fail(err error) { b.err = errors.Join(b.err, err) }

// try runs step unless an error has occurred.
func (b *bed) try(step func() error) {
	if b.err == nil {
		b.fail(step())
	}
}

// value is try for a step with a result.
func value[T any](b *bed, step func() (T, error)) (result T) {
	b.try(func() (err error) {
		result, err = step()

		return err
	})

	return result
}

func (b *bed) pause(d time.Duration) {
	b.try(func() error {
		ctx, cancel := context.WithTimeout(b.ctx, d)
		defer cancel()

		<-ctx.Done()

		return b.ctx.Err()
	})
}

// await waits until the condition holds, or an error occurs, such as the end of the subject.
func (b *bed) await(what string, interval time.Duration, condition func() bool) {
	b.try(func() error {
		err := wait.PollUntilContextTimeout(b.ctx, interval, timeout, true, func(context.Context) (bool, error) {
			if b.process != nil && b.process.Ended() != nil {
				return false, errors.New("the subject has ended")
			}

			return condition() || b.err != nil, nil
		})
		if err != nil {
			err = fmt.Errorf("wait until %s: %w", what, err)
		}

		return err
	})
}

// awaitNodes waits until there is a number of Nodes, and none of these is pending.
func (b *bed) awaitNodes(what string, number int, pending func(*corev1.Node) bool) {
	b.await(what, pollInterval, func() bool {
		list, err := b.informers.Core().V1().Nodes().Lister().List(labels.Everything())

		return err == nil && len(list) == number && !slices.ContainsFunc(list, pending)
	})
}

// awaitLeader waits until the lease has a holder other than a former one, and returns the holder.
func (b *bed) awaitLeader(former string) (holder string) {
	b.await("there is another leader", pollInterval, func() bool {
		var err error

		holder, err = product.Leader(b.ctx, b.client)

		return err == nil && holder != former
	})

	return holder
}

func (b *bed) watchNodes() (err error) {
	config := b.cluster.Config()
	config.Insecure, config.CAData = true, nil          // faults replace the CA
	config.ContentType = k8sruntime.ContentTypeProtobuf // which costs this process the least

	if b.client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}

	b.informers = informers.NewSharedInformerFactory(b.client, 0)

	_, err = b.informers.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    b.observe,
		UpdateFunc: func(_, obj any) { b.observe(obj) },
	})

	return errors.Join(err, b.startInformers())
}

// startInformers starts the informers that were requested, and waits until they are synced.
func (b *bed) startInformers() error {
	b.informers.Start(b.ctx.Done())
	b.informers.WaitForCacheSync(b.ctx.Done())

	return b.ctx.Err()
}

// podCIDR is a key of observed.
const podCIDR = "a pod CIDR"

func (b *bed) observe(obj any) {
	node, _ := obj.(*corev1.Node)

	for _, addr := range nodeAddresses(node) {
		b.observed.LoadOrStore(addr, time.Now())
	}

	if len(node.Spec.PodCIDRs) > 0 {
		b.observed.LoadOrStore(podCIDR, time.Now())
	}
}

// firstSeen returns when a Node had an address, or any Node had a pod CIDR, first.
func (b *bed) firstSeen(key any) time.Time {
	seen, _ := b.observed.Load(key)
	at, _ := seen.(time.Time)

	return at
}
