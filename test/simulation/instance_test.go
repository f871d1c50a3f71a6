package simulation_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

var (
	errConflict = errors.New("the object has been modified")
	errCrashed  = errors.New("the process has crashed")
	errLost     = errors.New("the reply was lost")
)

// instance is one process that leads: its cache, its inventory and its controllers.
type instance struct {
	sim       *simulation
	number    int
	informer  *informer
	inventory *inventory.Inventory
	cancel    context.CancelFunc
	crashed   chan struct{}
	stopped   chan struct{} // after all controllers
	stopping  bool
}

// lead starts an instance. Its initial list of Nodes may be stale, as the list of a watch cache.
func (s *simulation) lead() {
	ctx, cancel := context.WithCancel(klog.NewContext(s.t.Context(), klog.Logger{})) // which discards
	i := &instance{
		sim: s, number: s.count("instances"), inventory: inventory.New(time.Now), cancel: cancel, crashed: make(chan struct{}), stopped: make(chan struct{}),
		informer: newInformer(s.server, max(0, len(s.server.history)-s.IntN(4))),
	}

	controllers := s.controllers(i)

	// The reflector forgets the machines of deleted Nodes.
	_, err := i.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		name, _ := cache.DeletionHandlingMetaNamespaceKeyFunc(obj)
		i.inventory.Forget(name)
	}})
	require.NoError(s.t, err)

	for _, h := range i.informer.handlers {
		for !h.idle() {
			h.handle()
		}
	}

	s.leader = i

	var group sync.WaitGroup

	for _, run := range controllers {
		group.Go(func() { run(ctx) })
	}

	go func() {
		group.Wait()
		close(i.stopped)
	}()

	s.note("instance %d leads, cache at %d of %d", i.number, i.informer.version, len(s.server.history))
	s.pass(0)
}

// nodeControllers returns the Run methods of a node controller and an IPAM controller.
func (s *simulation) nodeControllers(i *instance) []func(context.Context) {
	ofNode, ofIPAM := newClient(i, node.Alias), newClient(i, nodeipam.Alias)

	nodeController, err := node.New(node.Config{
		Client: ofNode.kubernetes, Nodes: i.informer.nodes(ofNode), Inventory: i.inventory, Recorder: &record.FakeRecorder{}, Clock: clock.RealClock{},
		Options: func() nodespec.Options { return s.options() }, HasNodes: func() bool { return true },
		IsRecorded: func(*corev1.Node) bool { return true }, Workers: s.workers,
	})
	require.NoError(s.t, err)

	ipamController, err := nodeipam.New(nodeipam.Config{
		Client: ofIPAM.kubernetes, Nodes: i.informer.nodes(ofIPAM), Inventory: i.inventory, ControlPlane: s.network, Recorder: &record.FakeRecorder{},
		Clock: clock.RealClock{}, Selector: func() *rules.Selector { return s.options().Selector }, Pools: func() []nodeipam.Pool { return nil },
		Fallback: func() bool { return false }, Options: nodeipam.Options{ClusterCIDRs: clusterCIDRs},
	})
	require.NoError(s.t, err)

	return []func(context.Context){nodeController.Run, ipamController.Run}
}

// clusterCIDRs contain eight blocks of each family.
var clusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/21"), netip.MustParsePrefix("fd00:10:244::/77")}

// client is the connection of one controller of an instance to the API server and to its cache.
type client struct {
	instance   *instance
	controller string
	kubernetes kubernetes.Interface
}

func newClient(i *instance, controller string) *client {
	c := &client{instance: i, controller: controller}
	c.kubernetes = kubernetes.NewForConfigOrDie(&rest.Config{
		Host: "http://api-server", Transport: c, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: runtime.ContentTypeJSON},
	})

	return c
}

// call is a read of the cache or a request of a controller. It blocks until the simulation lets it continue, so that the
// seed determines the order of all calls.
type call struct {
	*client

	what, name string
	arrived    int // the move
	deadline   time.Time
	request    *http.Request
	body       []byte
	// planned is the view on which the controller based the request.
	planned view
	// returned is the Node in the response; nil if there is none.
	returned *corev1.Node
	// answered is true when a request has a response that the controller has not received.
	answered  bool
	response  *http.Response
	err       error
	abandoned bool // the controller no longer waits
	done      chan struct{}
}

func (c *call) String() string {
	return fmt.Sprintf("%d/%s %s %s", c.instance.number, c.controller, c.what, c.name)
}

// view is an instance's state of a Node and its machine.
type view struct {
	node    *corev1.Node
	entry   inventory.Entry
	managed bool
	spec    nodespec.Spec
	pending string
	renamed bool // another Node may have the machine's providerID
}

// view returns the view of a Node, which may be nil.
func (i *instance) view(n *corev1.Node) (v view) {
	if v.node = n; n == nil {
		return v
	}

	name := n.Name
	v.entry = i.inventory.Get(name)
	in := nodespec.NewInput(v.node, v.entry.Machine, i.sim.options()).WithPeers(i.inventory, name, func(other string) (*corev1.Node, error) {
		if node := i.informer.get(other); node != nil {
			return node, nil
		}

		return nil, errors.New("not found")
	})
	v.managed = nodespec.Selected(in)
	v.spec, _, v.pending = nodespec.Desired(in)

	for _, other := range names {
		v.renamed = v.renamed || i.inventory.RenamedTo(other) == name || i.inventory.Get(other).Condition == inventory.Mismatch
	}

	return v
}

// await blocks until the simulation lets the call continue, its context ends or the process crashes.
func (c *client) await(ctx context.Context, waiting *call) error {
	if !c.arrive(waiting) {
		return errCrashed
	}

	err := errCrashed

	select {
	case <-waiting.done:
		return waiting.err
	case <-ctx.Done():
		err = ctx.Err()
		// Requests that time out at the same time are retried in the order of their names, not in a random order.
		time.Sleep(time.Duration(slices.Index(names, waiting.name)))
	case <-c.instance.crashed:
	}

	c.instance.sim.mu.Lock()
	defer c.instance.sim.mu.Unlock()

	waiting.abandoned = true

	return err
}

// arrive adds a call, unless the process has crashed.
func (c *client) arrive(waiting *call) bool {
	s := c.instance.sim

	s.mu.Lock()
	defer s.mu.Unlock()

	if s.leader != c.instance {
		return false
	}

	waiting.client, waiting.arrived, waiting.done = c, s.moves, make(chan struct{})

	switch previous := s.released; {
	case waiting.request == nil:
	case previous == nil || previous.request == nil || previous.client != c || previous.name != waiting.name:
		waiting.planned = c.instance.view(c.instance.informer.get(waiting.name))
	case c.controller == node.Alias && previous.returned != nil: // it plans again after each request
		waiting.planned = c.instance.view(previous.returned)
	default: // it sends the requests of a plan one by one
		waiting.planned = previous.planned
	}

	s.calls = append(s.calls, waiting)

	return true
}

// RoundTrip implements http.RoundTripper.
func (c *client) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}

	name, _ := nodeOf(r)
	waiting := &call{what: r.Method + " " + r.URL.Path, name: name, request: r, deadline: time.Now().Add(time.Minute)}

	if r.Body != nil {
		waiting.body, _ = io.ReadAll(r.Body)
	}

	if timeout, err := time.ParseDuration(r.URL.Query().Get("timeout")); err == nil {
		waiting.deadline = time.Now().Add(timeout)
	}

	if err := c.await(r.Context(), waiting); err != nil {
		return nil, err
	}

	return waiting.response, nil
}

// respond sets the response of the API server: an object or an error.
func (c *call) respond(obj runtime.Object, err error) {
	code := http.StatusOK

	if err != nil {
		reported := apierrors.APIStatus(apierrors.NewInternalError(err))
		errors.As(err, &reported)

		status := reported.Status()
		status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
		obj, code = &status, int(status.Code)
	}

	c.returned, _ = obj.(*corev1.Node)
	body := io.NopCloser(bytes.NewReader(must(json.Marshal(obj))))
	c.response = &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}}, Body: body, Request: c.request}
}
