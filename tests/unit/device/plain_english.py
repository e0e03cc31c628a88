"""Fixed texts, of which a model is asked how likely it thinks them.

Several, as one of some four hundred tokens says a quotient of perplexities only to within a
percent, by which a sum's order can change it.
"""

ISLAND = """The ferry to the island leaves at seven in the morning, when the fog still lies on the
water and the gulls sit in rows along the harbour wall. Most of the passengers are fishermen on
their way home, with baskets that smell of salt and diesel. A few are teachers, who rent rooms
above the bakery from Monday to Friday and spend their evenings correcting papers by the light of
a single lamp. Nobody talks much before the first coffee.

In 1924 an engineer from the mainland measured the depth of the strait at forty-two points. His
notebook, which is kept in the town library, says that a bridge of six arches could be built for
less than the price of two new ships, provided that the stone came from the quarry behind the
church. The council thanked him, paid him for three weeks of work, and bought the ships. They
were called Hope and Patience, and the second one sank in its first winter.

To make the soup that is served on board, cut two onions and a leek into thin rings and let them
soften in butter. Add a spoonful of flour, stir, and pour in a litre of stock, a little at a time,
so that no lumps form. After twenty minutes put in the potatoes, and when they are almost done,
the fish. It must not boil any more from then on. Salt it at the very end, because the stock is
salty already, and hand it round with dark bread.

When a computer program sorts a list, it compares pairs of entries and swaps those that stand in
the wrong order. The simplest way to do this looks at every pair again and again; it is easy to
understand and slow for long lists. A better one cuts the list in halves, sorts each half in the
same way, and then merges the two. For a million entries the difference is that between a second
and most of a day. The islanders, who sort letters by hand, do it by street."""

RAILWAY = """The night train used to stop in the village twice a week, and the station master kept
a book of everybody who got off. Most pages are empty. On the third of March, when the line had
been closed by snow for nine days, he wrote down thirty-one names, among them a doctor, two nuns
and a man with a cello, all of whom slept on the benches of the waiting room until the road was
cleared. The cello is still there. It hangs above the ticket window, without strings.

Steel expands when it is warm. A rail of twenty-five metres grows by about a centimetre between a
cold winter night and a hot afternoon in July, which is why the old tracks were laid with gaps, and
why the wheels made the sound that passengers remember. Modern rails are welded together for
kilometres. They are fixed to heavy sleepers so firmly that they cannot move, and take up the
tension instead. If a track is badly laid, it may bend sideways on a very hot day, and trains have
to go slowly until the evening.

If you plan to walk the old line, begin at the tunnel and not at the bridge. Bring a lamp, good
shoes and enough water for four hours, as there is no spring on the way. The first part is easy and
almost flat. Behind the second signal the path leaves the track, climbs through a wood of beeches
and comes out on a meadow from which you can see both valleys. In autumn the wind is strong up
there, and it is better to eat before you arrive. Dogs are welcome, but should be kept on a lead
because of the sheep.

A timetable is a promise that many people make at once. The driver promises to be on time, the
signalman to keep the line free, and the passenger to be on the platform when the doors open. When
one of them is late, the others have to wait, and soon everybody is. For this reason a good
timetable has some minutes to spare in it, which nobody sees as long as all goes well."""

GARDEN = """My grandmother planted beans on the hundredth day of the year, whatever the weather was
like. She said that the moon had nothing to do with it, and that her neighbour, who waited for the
moon, ate his beans a week later than she did. Every evening she walked along the rows with a bucket
and picked the snails from the leaves. She carried them across the road and set them free behind
the cemetery, from where, she was sure, the same ones came back every night.

Soil is not dirt. A spoonful of it holds more living things than there are people on the earth, and
most of them have no name yet. They break down what falls from above, leaves and twigs and the
bodies of small animals, until plants can take it up again through their roots. A field that is
ploughed too often loses many of them, and then the rain washes the rest away. Farmers who noticed
this began to leave the straw where it was and to sow the next crop right through it.

To repair a wooden gate, take it off its hinges first and lay it flat on two trestles. Remove the
rusty screws with a little oil and a lot of patience. If a board is rotten at the lower end, cut it
off a hand's width above the rot and put a new piece in its place, with the grain running the same
way. Use glue that stands water and screws of brass. Let it dry for a day, paint it twice, and hang
it again a finger higher than before, so that it does not drag on the ground when the wood swells
in winter.

The word for a garden meant a fence in many old languages. What was inside was safe from goats,
and belonged to somebody; what was outside belonged to all, or to the king. It took a long time
until people began to plant flowers for no other reason than to look at them. The first who did so
were laughed at by those who grew cabbages. A few hundred years later the same families paid more
for one tulip than for a house, and lost everything they had in a single week of February."""

TEXTS = (ISLAND, RAILWAY, GARDEN)
