package talosapi

import (
	"context"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

const (
	// maxMetadata limits the labels, annotations and finalizers of a resource together. The COSI client copies all of them
	// for each of them, and ignores its context while it does (resource.NewMetadataFromProto). Talos sets a few.
	maxMetadata = 100

	// minSize is what a resource or an event counts at least, and elementSize what an element of a repeated field counts in
	// addition. Small ones need more memory than bytes on the wire: an empty link has two, and becomes 400.
	minSize     = 512
	elementSize = 64

	// maxDepth is how deep messages are searched for elements. Those that the COSI client decodes are less deep.
	maxDepth = 8

	// maxMessage limits a message of a watch, and the answer to a Get. An empty event has two bytes and becomes 140. The
	// largest real message is an update of a PlatformMetadata with 50 tags, which contains the previous version.
	maxMessage = 128 << 10

	// maxListed limits a message of a list, which has one resource. The largest is the LinkStatus of KubeSpan, with 550
	// bytes for each machine of the cluster.
	maxListed = 1 << 20

	// maxHeaders limits the HTTP/2 headers of an answer, which contain the error message.
	maxHeaders = 16 << 10

	otherKinds = 256 << 10
)

// limits are the sizes in bytes of all resources of a kind together, in a list or in a watch. Machines send a resource as
// protobuf and as YAML. TestDial_AcceptsLargestRealLists has what real machines need.
var limits = map[resource.Type]int{
	network.AddressStatusType:  5 << 20, // 10,000 of up to 512 bytes: kube-proxy in IPVS mode adds all Services' addresses
	cluster.MemberType:         8 << 20, // 10,000 of up to 840 bytes
	block.DiscoveredVolumeType: 1 << 20,
	network.LinkStatusType:     1 << 20,
	network.RouteStatusType:    1 << 20,
	hardware.PCIDeviceType:     1 << 20,
	runtime.MetaKeyType:        640 << 10, // Talos stores 256 KiB
}

// boundOptions limit what a machine may send. The local machine's socket is trusted.
func boundOptions(share *Share) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithChainUnaryInterceptor(boundUnary),
		grpc.WithChainStreamInterceptor(boundStream(share)),
	}
}

// boundUnary refuses answers that exceed the limits before the COSI client decodes them.
func boundUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if err := invoke(ctx, method, req, reply, cc, append(opts, grpc.MaxCallRecvMsgSize(maxMessage))...); err != nil {
		return err
	}

	b := bounds{kind: kindOf(req)}

	if answer, ok := reply.(*v1alpha1.GetResponse); ok {
		return b.checkResource(answer.GetResource())
	}

	return nil
}

// boundStream returns streams that refuse messages that exceed the limits before the COSI client decodes them.
func boundStream(share *Share) grpc.StreamClientInterceptor {
	return func(
		ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption,
	) (grpc.ClientStream, error) {
		return &boundedStream{bounds: bounds{share: share}, open: func(maxSize int, isList bool) (stream grpc.ClientStream, cancel context.CancelFunc, err error) {
			ctx, cancel := ctx, func() {}
			if isList {
				ctx, cancel = context.WithCancel(ctx)
			}

			stream, err = open(ctx, desc, cc, method, append(opts, grpc.MaxCallRecvMsgSize(maxSize))...)

			return stream, cancel, err
		}}, nil
	}
}

// boundedStream is a stream that opens with the request, because the limit of messages depends on the request.
type boundedStream struct {
	grpc.ClientStream

	open   func(maxSize int, isList bool) (grpc.ClientStream, context.CancelFunc, error)
	cancel context.CancelFunc
	bounds bounds
}

// SendMsg implements grpc.ClientStream.
func (s *boundedStream) SendMsg(request any) (err error) {
	kind, maxSize := kindOf(request), maxMessage

	limit, listed := limits[kind]
	if !listed {
		limit = otherKinds
	}

	_, isList := request.(*v1alpha1.ListRequest)
	if isList {
		maxSize = min(limit, maxListed)
	}

	s.bounds = bounds{kind: kind, limit: limit, share: s.bounds.share, sizes: map[resource.ID]int{}}

	s.ClientStream, s.cancel, err = s.open(maxSize, isList)
	s.open = nil // there is a watch for each machine and kind

	if err == nil {
		err = s.ClientStream.SendMsg(request)
	}

	if err != nil {
		s.cancel()
	}

	return err
}

// RecvMsg implements grpc.ClientStream. It ends a list with the first error. The caller must end a watch.
func (s *boundedStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)

	switch m := message.(type) {
	case *v1alpha1.ListResponse:
		if err == nil {
			err = s.bounds.checkListed(m.GetResource())
		}
	case *v1alpha1.WatchResponse:
		if err == nil {
			err = s.bounds.checkEvents(m.GetEvent(), time.Now())
		}
	}

	if err != nil {
		s.cancel()
	}

	return err
}

func kindOf(request any) resource.Type {
	typed, _ := request.(interface{ GetType() string }) // all requests have one

	return typed.GetType()
}

type bounds struct {
	kind  resource.Type
	limit int
	share *Share // of the session

	total  int                 // size of all resources
	sizes  map[resource.ID]int // of the resources that a watch has sent
	minute time.Time           // since when sent counts
	sent   int                 // size of a watch's events
}

func (b *bounds) checkListed(r *v1alpha1.Resource) error {
	n := size(r) + elementsSize(r)

	b.total += n
	if b.total > b.limit {
		return b.exceeded()
	}

	if err := b.share.charge(n); err != nil {
		return err
	}

	return b.checkResource(r)
}

// checkEvents limits the resources that a watch has sent and that were not destroyed. In a minute, a watch may send twice
// as much: all resources, and as much in changes.
func (b *bounds) checkEvents(list []*v1alpha1.Event, now time.Time) error {
	if now.Sub(b.minute) >= time.Minute {
		b.minute, b.sent = now, 0
	}

	for _, event := range list {
		inResource := elementsSize(event.GetResource())
		n := size(event) + inResource + elementsSize(event.GetOld())

		if b.sent += n; b.sent > 2*b.limit {
			return status.Errorf(codes.ResourceExhausted, "%s: machine sent changes of more than %d KiB in a minute", b.kind, 2*b.limit>>10)
		}

		if err := b.share.charge(n); err != nil {
			return err
		}

		for _, r := range []*v1alpha1.Resource{event.GetResource(), event.GetOld()} {
			if err := b.checkResource(r); err != nil {
				return err
			}
		}

		id := event.GetResource().GetMetadata().GetId()

		switch event.GetEventType() {
		case v1alpha1.EventType_BOOTSTRAPPED, v1alpha1.EventType_ERRORED, v1alpha1.EventType_NOOP:
		case v1alpha1.EventType_DESTROYED:
			b.total -= b.sizes[id]
			delete(b.sizes, id)
		default: // the COSI client takes unknown types for CREATED
			present := size(event.GetResource()) + inResource
			b.total += present - b.sizes[id]
			b.sizes[id] = present
		}

		if b.total > b.limit {
			return b.exceeded()
		}
	}

	return nil
}

// checkResource accepts a resource that is missing.
func (b *bounds) checkResource(r *v1alpha1.Resource) error {
	md := r.GetMetadata()

	switch count := len(md.GetLabels()) + len(md.GetAnnotations()) + len(md.GetFinalizers()); {
	case count > maxMetadata:
		return status.Errorf(codes.ResourceExhausted, "%s: a resource has more than %d labels, annotations and finalizers", b.kind, maxMetadata)
	case md != nil && md.GetType() != b.kind:
		return status.Errorf(codes.DataLoss, "%s: machine sent a resource of another type", b.kind)
	default:
		return nil
	}
}

func (b *bounds) exceeded() error {
	return status.Errorf(codes.ResourceExhausted, "%s: machine has more than %d KiB of them", b.kind, b.limit>>10)
}

// size returns what a message counts, without the elements in it.
func size(m proto.Message) int { return max(proto.Size(m), minSize) }

// elementsSize returns what the elements of a resource count.
func elementsSize(r *v1alpha1.Resource) int {
	count, _ := elements(r.GetSpec().GetProtoSpec(), maxDepth)

	return elementSize * count
}

// elements returns the number of elements of repeated fields in an encoded message, without the first of each field. It
// includes those of messages in it, for which it also takes strings that happen to be valid ones.
func elements(message []byte, depth int) (count int, isValid bool) {
	var seen uint64 // fields; higher numbers are of one

	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return count, false
		}

		length := protowire.ConsumeFieldValue(number, kind, message[n:])
		if length < 0 {
			return count, false
		}

		if kind == protowire.BytesType {
			field := uint64(1) << min(number, 63)
			if seen&field != 0 {
				count++
			}

			seen |= field

			if value, _ := protowire.ConsumeBytes(message[n:]); depth > 0 {
				if inner, ok := elements(value, depth-1); ok {
					count += inner
				}
			}
		}

		message = message[n+length:]
	}

	return count, true
}
