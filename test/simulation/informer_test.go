package simulation_test

import (
	"cmp"
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
)

// informer is the Node informer of an instance. The simulation decides when the cache receives a change, and when each
// handler is called afterwards. In the informer of client-go, this depends on scheduling and on delays of retries.
type informer struct {
	cache.SharedIndexInformer // no other methods are used

	server   *apiServer
	indexer  cache.Indexer
	version  int // of the cache
	handlers []*handler
}

// handler gets the changes of the cache in order, but later.
type handler struct {
	cache.ResourceEventHandler
	cache.ResourceEventHandlerRegistration

	backlog []func()
}

// newInformer returns an informer whose initial list has the given resourceVersion.
func newInformer(server *apiServer, version int) *informer {
	i := &informer{server: server, indexer: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})}
	i.relist(version)

	return i
}

func (i *informer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	added := &handler{ResourceEventHandler: h}
	i.handlers = append(i.handlers, added)

	for _, name := range slices.Sorted(slices.Values(i.indexer.ListKeys())) {
		node := i.get(name)
		added.backlog = append(added.backlog, func() { h.OnAdd(node, true) })
	}

	return added, nil
}

func (i *informer) AddIndexers(indexers cache.Indexers) error { return i.indexer.AddIndexers(indexers) }
func (i *informer) GetIndexer() cache.Indexer                 { return i.indexer }
func (i *informer) HasSynced() bool                           { return true }

// HasSynced is always true: handlers are called for the initial list before the controllers run.
func (h *handler) HasSynced() bool { return true }

func (h *handler) idle() bool { return len(h.backlog) == 0 }

func (i *informer) get(name string) *corev1.Node {
	obj, _, _ := i.indexer.GetByKey(name) // cannot fail
	node, _ := obj.(*corev1.Node)

	return node
}

// behind reports whether the cache is older than the API server.
func (i *informer) behind() bool { return i.version < len(i.server.history) }

// next receives the next event of the watch.
func (i *informer) next() {
	e := i.server.history[i.version]
	i.version++

	if e.deleted {
		i.remove(e.node.Name, e.node)
	} else {
		i.set(e.node)
	}
}

// relist replaces the cache, after the watch has failed.
func (i *informer) relist(version int) {
	i.version = version
	nodes := i.server.at(version)

	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		i.set(nodes[name])
	}

	for _, name := range slices.Sorted(slices.Values(i.indexer.ListKeys())) {
		if nodes[name] == nil {
			i.remove(name, cache.DeletedFinalStateUnknown{Key: name, Obj: i.get(name)})
		}
	}
}

func (i *informer) set(node *corev1.Node) {
	before := i.get(node.Name)
	if before != nil && before.ResourceVersion == node.ResourceVersion {
		return
	}

	_ = i.indexer.Update(node) // cannot fail

	i.notify(func(h *handler) {
		if before == nil {
			h.OnAdd(node, false)
		} else {
			h.OnUpdate(before, node)
		}
	})
}

func (i *informer) remove(name string, last any) {
	_ = i.indexer.Delete(i.get(name)) // cannot fail

	i.notify(func(h *handler) { h.OnDelete(last) })
}

func (i *informer) notify(call func(h *handler)) {
	for _, h := range i.handlers {
		h.backlog = append(h.backlog, func() { call(h) })
	}
}

// handle calls the handler for the next change.
func (h *handler) handle() {
	next := h.backlog[0]
	h.backlog = h.backlog[1:]
	next()
}

// nodes is the informer as one controller uses it. It waits before it reads the cache, unless the client is nil.
type nodes struct {
	corelisters.NodeLister

	informer *informer
	client   *client
}

func (i *informer) nodes(c *client) nodes { return nodes{corelisters.NewNodeLister(i.indexer), i, c} }

func (n nodes) Informer() cache.SharedIndexInformer { return n.informer }
func (n nodes) Lister() corelisters.NodeLister      { return n }

func (n nodes) Get(name string) (*corev1.Node, error) {
	n.await(&call{what: "get", name: name})

	return n.NodeLister.Get(name)
}

func (n nodes) List(selector labels.Selector) ([]*corev1.Node, error) {
	n.await(&call{what: "list"})
	list, err := n.NodeLister.List(selector)
	slices.SortFunc(list, func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })

	return list, err
}

func (n nodes) await(c *call) {
	if n.client != nil {
		_ = n.client.await(context.Background(), c) // a crash, after which nothing is written
	}
}
