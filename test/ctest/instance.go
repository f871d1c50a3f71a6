package ctest

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

// Instance is what the controllers of one process share, as in the product: create the controllers with its fields,
// then start it with their Run methods.
type Instance struct {
	Client    kubernetes.Interface
	Factory   informers.SharedInformerFactory
	Nodes     coreinformers.NodeInformer
	Inventory *inventory.Inventory
	// Reflector follows Nodes after a call of FollowNodes. It uses the system clock.
	Reflector *reflector.Reflector
	// Recorder records Events in the API server.
	Recorder record.EventRecorder
	// Start runs functions and the informers until Stop, which returns when all have ended. Both end with ctx, too.
	Start func(run ...func(context.Context))
	Stop  func()
}

// NewInstance returns an instance with an empty inventory. Without dial, it has no reflector.
func NewInstance(ctx context.Context, config *rest.Config, dial talosapi.DialFunc) (*Instance, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("create client: %w", err)
	}

	ctx, cancel := context.WithCancel(ctx)
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})

	i := &Instance{
		Client:    client,
		Factory:   informers.NewSharedInformerFactory(client, 0),
		Inventory: inventory.New(time.Now),
		Recorder:  broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "talos-ccm"}),
	}
	i.Nodes = i.Factory.Core().V1().Nodes()

	if dial != nil {
		i.Reflector = reflector.New(i.Inventory, dial, clock.RealClock{})
	}

	var group sync.WaitGroup

	i.Start = func(run ...func(context.Context)) {
		for _, f := range run {
			group.Go(func() { f(ctx) })
		}

		i.Factory.Start(ctx.Done())
	}
	i.Stop = sync.OnceFunc(func() {
		cancel()
		group.Wait()
		i.Factory.Shutdown()
		broadcaster.Shutdown()
	})

	return i, nil
}
